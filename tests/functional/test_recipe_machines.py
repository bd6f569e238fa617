"""Each recipe bakes on a real machine, and its forks have what its page says from the start."""

from __future__ import annotations

import base64
import os
import sys
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from benchmarks.recipes import QUESTIONS, ask
from forkd.model.sandbox import BranchOptions, ForkOptions
from tests.support.callers import CALLER
from tests.support.programs import outcome_of
from tests.support.real_daemon import daemon_of
from tests.support.real_host import (
    EVAL_TIMEOUT_S,
    FORK_DEADLINE_S,
    REAL_IN_SOAK,
    ROOT,
    TAG,
    baked_host,
    shell,
    value,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.bakes import Bakes
    from tests.support.real_host import RealHost

pytestmark = [*REAL_IN_SOAK, pytest.mark.timeout(3600)]

OPTIONS = ForkOptions(deadline_s=FORK_DEADLINE_S)

PROJECT_TIMEOUT_S = 1_800.0
"""Time for the tests of a project, in forks of an emulated machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(bakes: Bakes, request: pytest.FixtureRequest) -> AsyncIterator[RealHost]:
    """A host with the recipe of the test baked; it has had its own question answered."""
    async with baked_host(bakes, ROOT / "recipes" / request.param) as host:
        question = QUESTIONS[request.param]
        async with host.forked(1, OPTIONS) as (sandbox,):
            answer, said = await ask(host.service, sandbox.id, question)
            assert answer == question.answer, said
        yield host


def baked(name: str) -> pytest.MarkDecorator:
    """Mark a test whose host has this recipe."""
    return pytest.mark.parametrize("host", [name], indirect=True)


@baked("redis")
async def test_redis_has_its_data_and_each_fork_its_own_server(host: RealHost) -> None:
    async with host.forked(2, OPTIONS) as (one, other):
        assert await shell(host, one.id, "redis-cli ping") == "PONG\n"
        assert await value(host, one.id, "cache.set('user:7', 'changed')") is True
        assert await shell(host, one.id, "redis-cli get user:7") == "changed\n"
        assert await value(host, other.id, "cache.get('user:7')") == "name 7"
        made = await host.service.branches.branch(CALLER, one.id, 1, BranchOptions())
        (sibling,) = made.fork.sandboxes
        assert await value(host, sibling.id, "cache.get('user:7')") == "changed"
        await host.service.sandboxes.delete(CALLER, sibling.id)


@baked("python-data")
async def test_python_data_computes_and_draws_without_an_import(host: RealHost) -> None:
    async with host.forked(2, OPTIONS) as (one, other):
        table = "pd.DataFrame({'a': [1, 2, 2], 'b': [3, 4, 5]}).groupby('a').b.sum().to_dict()"
        assert await value(host, one.id, f"[*{table}.values()]") == [3, 9]
        draw = "image = io.BytesIO(); plt.plot([1, 3]); plt.savefig(image, format='png')"
        assert await value(host, one.id, f"{draw}\nimage.getvalue()[1:4].decode()") == "PNG"
        code = "plt.plot([1, 3]); pd.DataFrame({'a': [1]})"
        frame, chart = (await host.service.guests.eval(CALLER, one.id, code)).results
        assert "<table" in frame.data["text/html"]
        assert base64.b64decode(chart.data["image/png"])[1:4] == b"PNG"
        assert await value(host, other.id, "float(stats.norm.cdf(0))") == 0.5
        draws = [await value(host, each.id, "np.random.random()") for each in (one, other)]
        assert draws[0] != draws[1]


@baked("code-interpreter")
async def test_cells_of_two_languages_keep_state_and_show_what_a_notebook_shows(
    host: RealHost,
) -> None:
    async with host.forked(2, OPTIONS) as (one, other):
        draws = [await value(host, each.id, "js('crypto.randomUUID()')") for each in (one, other)]
        assert draws[0] != draws[1]
        show = "print('hi'); plt.plot([1, 2]); table = pd.DataFrame({'a': [1]}); table"
        shown = await value(host, one.id, f"cell({show!r})")
        assert [each["type"] for each in shown] == ["stream", "display_data", "execute_result"]
        assert shown[0]["text"] == "hi\n"
        assert base64.b64decode(shown[1]["data"]["image/png"])[1:4] == b"PNG"
        assert "<table" in shown[2]["data"]["text/html"]
        (failed,) = await value(host, one.id, "cell('1 / 0')")
        assert (failed["ename"], failed["evalue"]) == ("ZeroDivisionError", "division by zero")
        assert failed["traceback"].count("File") == 1

        assert await value(host, one.id, "cell('let n = 41', 'javascript')") == []
        (result,) = await value(host, one.id, "cell('await 0; [n + 1]', 'javascript')")
        assert result["data"] == {"text/plain": "[ 42 ]", "application/json": [42]}
        (failed,) = await value(host, other.id, "cell('n', 'javascript')")
        assert failed["ename"] == "ReferenceError"

        made = await host.service.branches.branch(CALLER, one.id, 1, BranchOptions())
        (sibling,) = made.fork.sandboxes
        assert await value(host, sibling.id, "[js('n'), len(table)]") == [41, 1]
        await host.service.sandboxes.delete(CALLER, sibling.id)

        eval_ = host.service.guests.eval
        late = await eval_(CALLER, one.id, "js('while (true) {}')", timeout_s=1)
        assert late.timed_out
        assert await value(host, one.id, "[js('n'), len(table)]") == [41, 1]


@baked("java")
async def test_java_keeps_state_in_forks_and_branches_and_draws_for_itself(host: RealHost) -> None:
    async with host.forked(2, OPTIONS) as (one, other):
        assert await value(host, one.id, "int kept = twice(21); kept") == 42
        refused = await host.service.guests.eval(CALLER, other.id, "kept", timeout_s=EVAL_TIMEOUT_S)
        assert refused.error is not None
        assert refused.error.type == "CompilationError"
        for draw in ("Math.random()", "UUID.randomUUID().toString()", "new Random().nextLong()"):
            assert await value(host, one.id, draw) != await value(host, other.id, draw)
        begin = (
            "var counted = new java.util.concurrent.atomic.AtomicInteger();"
            "Thread counter = new Thread(() -> { while (true) counted.incrementAndGet(); });"
            "counter.setDaemon(true); counter.start();"
        )
        assert await value(host, one.id, begin) is None
        made = await host.service.branches.branch(CALLER, one.id, 1, BranchOptions())
        (sibling,) = made.fork.sandboxes
        # Each of the threads goes on in each machine.
        since = "int since = counted.get(); Thread.sleep(50); kept == 42 && counted.get() > since"
        for each in (sibling.id, one.id):
            assert await value(host, each, since) is True
        await host.service.sandboxes.delete(CALLER, sibling.id)


@baked("jupyter-kernel")
async def test_a_jupyter_kernel_keeps_state_and_says_what_a_cell_has_done(host: RealHost) -> None:
    async with host.forked(2, OPTIONS) as (one, other):
        assert await value(host, one.id, "cell('x = 41; print(x)')[0]['text']") == "41\n"
        assert await value(host, one.id, "cell('x + 1')[0]['data']['text/plain']") == "42"
        assert await value(host, other.id, "cell('x')[0]['ename']") == "NameError"
        made = await host.service.branches.branch(CALLER, one.id, 1, BranchOptions())
        (sibling,) = made.fork.sandboxes
        assert await value(host, sibling.id, "cell('x')[0]['data']['text/plain']") == "41"
        await host.service.sandboxes.delete(CALLER, sibling.id)
        late = "try:\n    cell('while True: pass', 2)\nexcept TimeoutError as error:\n    "
        words = await value(host, one.id, f"{late}said = str(error)\nsaid")
        assert words == "the cell ran for more than 2 seconds"
        assert await value(host, one.id, "cell('x')[0]['data']['text/plain']") == "41"


async def outcome_in_forks(host: RealHost, project: Path, *options: str) -> tuple[int, str]:
    """Run the tests of a recipe's project in forks; return the exit code, and what was said."""
    async with daemon_of(host) as url:
        words = ("-q", "-p", "no:cacheprovider", "--forkd", TAG, "--forkd-workers", "2", *options)
        environ = {**os.environ, "FORKD_URL": url, "PYTHONDONTWRITEBYTECODE": "1"}
        command = (sys.executable, "-m", "pytest", *words)
        return await outcome_of(*command, timeout_s=PROJECT_TIMEOUT_S, cwd=project, env=environ)


@baked("pytest")
async def test_each_test_of_a_collected_project_has_a_fork_of_its_own(host: RealHost) -> None:
    async with host.forked(1, OPTIONS) as (one,):
        ends = await value(host, one.id, "run()")
        assert sorted(ends.values()) == ["failed"] * 2 + ["passed"] * 4
    project, there = ROOT / "recipes/pytest/project", ("--forkd-path", "/srv/project")
    code, said = await outcome_in_forks(host, project, *there, "--forkd-fresh")
    assert (code, "6 passed" in said) == (0, True), said


@baked("ci-parallel-pytest")
async def test_tests_that_share_a_port_and_a_path_run_at_the_same_time(host: RealHost) -> None:
    code, said = await outcome_in_forks(host, ROOT / "recipes/ci-parallel-pytest/project")
    assert (code, "24 passed" in said) == (0, True), said


@baked("coding-agent")
async def test_a_coding_agent_has_its_tools_and_each_fork_a_repository(host: RealHost) -> None:
    async with host.forked(2, OPTIONS) as (one, other):
        broken = "open('/srv/project/slug.py', 'w').write('def slug(title):\\n    return title\\n')"
        await value(host, one.id, broken)
        assert await value(host, one.id, "run_tests()['exit']") == 1
        assert "2 passed" in await value(host, other.id, "run_tests()['output']")
        assert (await shell(host, one.id, "cd /srv/project && git commit -qam change")) == ""
        count = "cd /srv/project && git rev-list --count HEAD"
        assert [await shell(host, each.id, count) for each in (one, other)] == ["2\n", "1\n"]
        lines = "make -s && build/c && build/cc && rg -c slug test_slug.py && ruff check ."
        done = await value(host, other.id, f"sh({lines!r})")
        assert done["output"] == "hello from C\nhello from C++\n3\nAll checks passed!\n"
        assert await shell(host, other.id, "node -p '[1, 2].map((n) => n * 2).join()'") == "2,4\n"


@baked("onnx")
async def test_a_loaded_model_infers_in_each_fork(host: RealHost) -> None:
    async with host.forked(2, OPTIONS) as (one, other):
        assert await value(host, one.id, 'identify(\'{"a": [1, 2, 3], "b": null}\')') == "json"
        assert await value(host, other.id, "identify(open('/bin/ls', 'rb').read())") == "elf"
        best = await value(host, other.id, "scores('import os\\n\\nprint(os.getcwd())\\n', 2)")
        assert best[0][0] == "python"
        assert best[0][1] > best[1][1]
        shape = await value(
            host, one.id, "session.run(None, {'bytes': _features(b'')[None]})[0].shape"
        )
        assert shape == [1, 214]


@baked("chromium")
async def test_a_browser_shows_pages_and_each_fork_has_its_own(host: RealHost) -> None:
    page = "data:text/html,<title>one</title><p>first</p><script>var x = 41</script>"
    async with host.forked(2, OPTIONS) as (one, other):
        went = await value(host, one.id, f"visit({page!r})")
        assert (went["title"], went["text"]) == ("one", "first")
        assert await value(host, one.id, "js('x + 1')") == 42
        assert await value(host, other.id, "js('location.href')") == "about:blank"
        drawn = "open(screenshot(), 'rb').read()[1:4].decode()"
        assert await value(host, other.id, drawn) == "PNG"
        words = "js('[...crypto.getRandomValues(new Uint32Array(4)), Math.random()]')"
        draws = [await value(host, each.id, words) for each in (one, other)]
        assert not set(draws[0]) & set(draws[1])
        made = await host.service.branches.branch(CALLER, one.id, 1, BranchOptions())
        (sibling,) = made.fork.sandboxes
        assert await value(host, sibling.id, "js('x + 2')") == 43
        await host.service.sandboxes.delete(CALLER, sibling.id)
        found = "grep -l chromium /proc/[0-9]*/comm | sed s/comm/status/"
        users = f"{found} | xargs grep -h ^Uid: | cut -f2 | sort -u"
        assert await shell(host, other.id, users) == await shell(host, other.id, "id -u browser")
