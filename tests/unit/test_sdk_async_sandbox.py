"""The first lines of the SDK, in both flavours: a sandbox alone, many at once, programs in them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from forkd import AsyncClient, AsyncSandbox, AsyncSandboxes
from forkd.errors import (
    ClientClosed,
    CommandError,
    Conflict,
    EngineError,
    ExecTimeout,
    GuestError,
    InvalidRequest,
    NotFound,
)
from forkd.limits import EVAL_CONTEXTS_MAX
from forkd.model.ids import SandboxId
from forkd.model.sandbox import SandboxState
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.daemon import RunningDaemon


@pytest.fixture(autouse=True)
def environment(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.service.stored = some_snapshots("warm", "is-flaky", "pyagent", "other")
    monkeypatch.setenv("FORKD_URL", daemon.url)


@pytest.fixture
async def client(daemon: RunningDaemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.url) as client:
        yield client


@pytest.fixture
async def sandbox(client: AsyncClient) -> AsyncSandbox:
    return await client.sandbox("warm")


async def test_a_sandbox_is_forked_by_its_name_and_killed_at_the_end(daemon: RunningDaemon) -> None:
    async with AsyncSandbox("warm", memory_limit_mib=64) as sandbox:
        assert (await sandbox.run("echo hi")).stdout == "hi\n"
        assert (sandbox.tag, sandbox.info.memory_limit_mib) == ("warm", 64)
        assert list(daemon.service.running) == [sandbox.id]
        async with await sandbox.branch(2) as (left, right):
            await left.eval("x = 1")
            assert (await right.eval("x")).error is not None
            assert len(daemon.service.running) == 3

    assert daemon.service.running == {}


async def test_a_sandbox_is_forked_with_a_client_that_is_given(client: AsyncClient) -> None:
    sandbox = await AsyncSandbox.create("warm", client=client)

    assert [each.id for each in await client.sandboxes.list()] == [sandbox.id]


async def test_a_sandbox_that_cannot_be_forked_says_why() -> None:
    with pytest.raises(NotFound, match="nothing"):
        await AsyncSandbox.create("nothing")


async def test_a_sandbox_is_forked_from_an_image(
    client: AsyncClient, daemon: RunningDaemon
) -> None:
    steps: list[str] = []

    async with AsyncSandbox(
        image="python:3.12", on_progress=lambda step: steps.append(step.stage)
    ) as sandbox:
        assert sandbox.tag not in {"warm", "pyagent"}
        assert list(daemon.service.running) == [sandbox.id]
    assert steps
    assert (await client.sandbox(image="python:3.12")).tag in daemon.service.stored
    with pytest.raises(InvalidRequest, match="a tag or an image, not both"):
        await AsyncSandbox.create("warm", image="python:3.12")
    with pytest.raises(NotFound, match="no image at"):
        await AsyncSandbox.create(image="./nothing.tar")


async def test_a_sandbox_that_is_there_is_found_again(sandbox: AsyncSandbox) -> None:
    found = await AsyncSandbox.connect(sandbox.id)

    await sandbox.eval("x = 7")
    assert (await found.eval("x")).value == 7
    with pytest.raises(NotFound):
        await AsyncSandbox.connect("sb-7q66thaaaaaaaaaaaaaaaaaaaa")


async def test_a_sandbox_lives_five_minutes_unless_told_otherwise(client: AsyncClient) -> None:
    for made, life_s in (
        (await client.sandbox("warm"), 300),
        (await AsyncSandbox.create("warm"), 300),
        (await AsyncSandbox.create("warm", ttl_s=60.0), 60),
        (await AsyncSandbox.create("warm", timeout=60.0), 60),
    ):
        assert made.info.expires_at_unix == made.info.created_at_unix + life_s
    for endless in (await client.sandbox("warm", ttl_s=None), (await client.fork("warm"))[0]):
        assert endless.info.expires_at_unix is None


async def test_a_sandbox_may_be_killed_again_and_again(sandbox: AsyncSandbox) -> None:
    assert await sandbox.is_running()

    assert [await sandbox.kill(), await sandbox.kill()] == [True, False]

    assert not await sandbox.is_running()


async def test_an_error_in_the_block_is_not_hidden_by_one_at_its_end(daemon: RunningDaemon) -> None:
    async def fail(client: AsyncClient) -> None:
        async with await client.sandbox("warm"):
            await client.aclose()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        await fail(AsyncClient(daemon.url))

    assert "was not killed" in caught.value.__notes__[0]


async def test_a_closed_client_says_so(client: AsyncClient, sandbox: AsyncSandbox) -> None:
    await client.aclose()

    with pytest.raises(ClientClosed, match="is closed"):
        await sandbox.eval("1")
    with pytest.raises(ClientClosed, match="is closed"):
        await sandbox.files.read("/tmp/x")
    with pytest.raises(ClientClosed, match="is closed"):
        async with sandbox.exec_stream("true"):
            pass


async def test_the_forks_of_one_call_are_a_sequence_that_is_killed_as_one(
    client: AsyncClient, daemon: RunningDaemon
) -> None:
    async with await client.fork("warm", 3) as made:
        assert (len(made), made[0], list(made)[-1]) == (3, next(iter(made)), made[-1])
        assert isinstance(made[1:], AsyncSandboxes)
        assert [each.id for each in made[1:]] == [made[1].id, made[2].id]
        assert made[1] in made

    assert daemon.service.running == {}


async def test_many_are_asked_at_once_and_answer_in_order(client: AsyncClient) -> None:
    made = await client.fork("warm", 5)

    async def name(sandbox: AsyncSandbox) -> str:
        await sandbox.eval(f"me = {sandbox.id!r}")
        return sandbox.id

    assert await made.map(name, parallel_max=2) == [each.id for each in made]
    assert [each.value for each in await made.eval("me")] == [each.id for each in made]
    assert [each.stdout for each in await made.exec("echo", "a")] == ["a\n"] * 5
    assert [str(each) for each in await made.run("echo b", timeout_s=5.0)] == ["b\n"] * 5
    assert await made[:2].kill() == [True, True]
    assert await made.kill() == [False, False, True, True, True]


async def test_an_error_of_one_waits_for_the_others(
    client: AsyncClient, daemon: RunningDaemon
) -> None:
    made = await client.fork("warm", 3)
    await made[0].kill()

    with pytest.raises(NotFound, match=made[0].id):
        await made.run("echo")

    assert len(daemon.service.execs) == 2
    with pytest.raises(InvalidRequest, match="parallel_max"):
        await made.map(AsyncSandbox.kill, parallel_max=0)


async def test_a_fork_that_fails_in_part_gives_the_sequence_and_the_failures(
    client: AsyncClient,
) -> None:
    ready, failed = await client.try_fork("is-flaky", 4)

    assert (type(ready), len(ready), len(failed)) == (AsyncSandboxes, 2, 2)
    with pytest.raises(EngineError):
        await client.fork("is-flaky", 2)


async def test_a_line_is_read_by_a_shell_and_words_are_not(
    sandbox: AsyncSandbox, daemon: RunningDaemon
) -> None:
    await sandbox.run("echo a | wc -l")
    await sandbox.exec("echo", "a | wc -l")
    await sandbox.exec(["echo", "a | wc -l"])

    shell, *words = [each.request.args for each in daemon.service.execs]
    assert shell == ("/bin/sh", "-c", "echo a | wc -l")
    assert words == [("echo", "a | wc -l")] * 2


@pytest.mark.parametrize("line", ["ls -l", b"ls", ""])
async def test_a_line_without_a_shell_is_refused_with_the_way_out(
    sandbox: AsyncSandbox, line: str | bytes
) -> None:
    wrong: Any = line
    with pytest.raises(InvalidRequest, match=r"run\(.ls -l.\) has a shell|args"):
        await sandbox.exec(wrong)
    with pytest.raises(InvalidRequest, match="not both"):
        await sandbox.exec(["ls"], "-l")
    with pytest.raises(InvalidRequest, match=r"exec\(.*runs a program"):
        await sandbox.run(["ls", "-l"])  # type: ignore[call-overload]  # what is tested


async def test_an_exit_code_is_an_error_only_where_that_is_asked_for(sandbox: AsyncSandbox) -> None:
    result = await sandbox.exec("exit", "3")
    assert (result.exit_code, result.ok) == (3, False)

    with pytest.raises(CommandError, match=r"^exit 3 exited with 3") as caught:
        result.check()
    assert caught.value.result is result
    with pytest.raises(CommandError, match="exited with 3"):
        await sandbox.run("exit 3", check=True)
    assert (await sandbox.run("echo hi", check=True)).check().ok


@pytest.mark.parametrize("text", [True, False])
async def test_a_program_out_of_time_is_an_error_that_has_its_output(
    sandbox: AsyncSandbox, *, text: bool
) -> None:
    said: Any = "so far\n" if text else b"so far\n"
    run: Any = sandbox.exec

    with pytest.raises(ExecTimeout, match=r"^late was killed after 0\.5 s.*so far") as caught:
        await run("late", timeout_s=0.5, text=text)

    assert caught.value.result.stdout == said
    result = await run("late", timeout_s=0.5, text=text, check=False)
    assert (result.stdout, result.timed_out, result.ok) == (said, True, False)
    with pytest.raises(ExecTimeout):
        await sandbox.run("late", timeout_s=0.5)


async def test_output_is_told_as_it_comes_and_kept(sandbox: AsyncSandbox) -> None:
    told: list[str] = []
    errors: list[str] = []

    result = await sandbox.exec("fail", on_stdout=told.append, on_stderr=errors.append)

    assert (told, errors) == (["out"], ["err �"])
    assert (result.stdout, result.stderr) == ("out", "err �")


async def test_bytes_go_in_and_come_out(sandbox: AsyncSandbox) -> None:
    sent = bytes(range(256)) * 20_000
    told = bytearray()

    result = await sandbox.exec("cat", stdin=sent, text=False, on_stdout=told.extend)

    assert (result.stdout, bytes(told), result.truncated) == (sent, sent, False)
    assert (await sandbox.exec("fail", text=False)).stderr == b"err \xff"
    assert (await sandbox.exec("cat", stdin=b"")).stdout == ""
    assert (await sandbox.exec("cat", stdin="x" * 600_000)).stdout == "x" * 600_000


async def test_told_output_is_kept_to_the_same_limit(sandbox: AsyncSandbox) -> None:
    limit, told = 8 << 20, 0

    def count(piece: bytes) -> None:
        nonlocal told
        told += len(piece)

    beyond = await sandbox.exec("spew", str(limit + 1), text=False, on_stdout=count)

    assert (len(beyond.stdout), beyond.truncated, told > limit) == (limit, True, True)


async def test_a_callback_that_raises_ends_the_program(
    sandbox: AsyncSandbox, daemon: RunningDaemon
) -> None:
    def refuse(_: str) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await sandbox.exec("cat", stdin="x" * 4_000_000, on_stdout=refuse)

    daemon.wait_for(lambda: daemon.service.execs[0].closed)


async def test_an_exception_in_code_is_an_error_only_where_that_is_asked_for(
    sandbox: AsyncSandbox,
) -> None:
    assert (await sandbox.eval("1 / 0")).error is not None
    with pytest.raises(GuestError, match="ZeroDivisionError"):
        await sandbox.eval("1 / 0", check=True)


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ({"memory": 64}, r"fork\(\) has no option 'memory'; did you mean memory_limit_mib\?"),
        ({"ttl": 5}, r"did you mean ttl_s\?"),
        ({"netwrok": "internet"}, r"did you mean network\?"),
        ({"cpu": 1}, "did you mean cpu_limit or cpu_weight"),
        ({"qqq": 1}, "its options are tag, n, memory_limit_mib"),
    ],
)
async def test_an_option_that_does_not_exist_says_which_does(
    client: AsyncClient, wrong: dict[str, Any], advice: str
) -> None:
    with pytest.raises(InvalidRequest, match=advice) as caught:
        await client.fork("warm", **wrong)

    assert caught.value.context["field"] == next(iter(wrong))


async def test_every_call_with_options_says_so_by_its_own_name(
    client: AsyncClient, sandbox: AsyncSandbox
) -> None:
    with pytest.raises(InvalidRequest, match=r"Sandbox\(\) has no option 'memory'"):
        AsyncSandbox("warm", memory=64)  # type: ignore[call-arg]  # what is tested
    for call, name in (
        (client.sandbox, "sandbox"),
        (client.try_fork, "try_fork"),
        (sandbox.run, "run"),
        (sandbox.exec, "exec"),
        (sandbox.eval, "eval"),
        (sandbox.exec_stream, "exec_stream"),
    ):
        ask: Any = call
        with pytest.raises(InvalidRequest, match=rf"^{name}\(\) has no option 'timout_s'"):
            await ask("x", timout_s=1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"template": "warm"}, "template is another name of tag"),
        ({"labels": {"a": "b"}, "metadata": {"a": "b"}}, "metadata is another name of labels"),
        ({"env": {"A": "b"}, "envs": {"A": "b"}}, "envs is another name of env"),
    ],
)
async def test_two_names_of_one_option_are_refused(
    daemon: RunningDaemon, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await AsyncSandbox.create("warm", **wrong)

    assert daemon.service.running == {}


async def test_an_option_out_of_range_is_called_what_the_caller_called_it(
    client: AsyncClient,
) -> None:
    for wrong in ({"ttl_s": 0.0}, {"deadline_s": 0.0}, {"memory_limit_mib": 1}, {"secrets": ["?"]}):
        options: Any = wrong
        (name,) = wrong
        with pytest.raises(InvalidRequest, match=rf"^{name}[.:]"):
            await client.fork("warm", **options)


async def test_the_constructor_of_the_references_package_is_taken(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncSandbox(None, None, 30) as sandbox:
        assert (sandbox.tag, sandbox.timeout) == ("pyagent", 30)
        assert (await sandbox.commands.run("echo hi", timeout=5)).stdout == "hi\n"
        assert str(await sandbox.eval("1 + 1")) == "2"
        async with AsyncSandbox(target=sandbox.id, spawn=False) as borrowed:
            assert borrowed.target == sandbox.id
            assert await borrowed.kill() is False
        assert list(daemon.service.running) == [sandbox.id]
    monkeypatch.setenv("FORKD_TAG", "other")
    async with AsyncSandbox(network=True) as other:
        assert other.tag == "other"
        async with AsyncSandbox(target=f"{other.info.guest_addr}:8888", spawn=False) as found:
            assert found.id == other.id
    for target in ("10.42.0.2:8888", "nothing"):
        with pytest.raises(NotFound, match="no sandbox has"):
            async with AsyncSandbox(target=target, spawn=False):
                pass
    with pytest.raises(InvalidRequest, match="needs a target"):
        async with AsyncSandbox(spawn=False):
            pass


async def test_a_program_written_for_e2b_runs(daemon: RunningDaemon) -> None:
    """The names whose meaning is the same; docs/howto/move-from-e2b.md has the table."""
    sandbox = await AsyncSandbox.create(
        "warm", timeout=60, allow_internet_access=True, metadata={"a": "b"}, envs={"C": "d"}
    )
    assert sandbox.sandbox_id == sandbox.id
    assert await sandbox.is_running()
    assert sandbox.labels == {"a": "b"}

    done = await sandbox.commands.run("echo hi", envs={"A": "b"}, cwd="/tmp", timeout=60)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "hi\n", "")
    assert dict(daemon.service.execs[-1].request.env) == {"A": "b", "C": "d"}

    execution = await sandbox.run_code("print('hi'); 40 + 2")
    assert (execution.text, execution.logs.stdout, execution.error) == ("42", ["hi\n"], None)
    assert [(each.text, each.json, each.formats()) for each in execution.results] == [
        ("42", 42, ["text", "json"])
    ]
    (opaque,) = (await sandbox.run_code("object")).results
    assert (str(opaque), opaque.json, opaque.formats()) == ("<class 'object'>", None, ["text"])
    assert (await sandbox.run_code("x = 1")).results == []
    html = "class Html:\n    def _repr_html_(self): return '<b>1</b>'\nHtml()"
    (table,) = (await sandbox.run_code(html)).results
    assert (table.html, table.png, table.formats()) == ("<b>1</b>", None, ["text", "html"])
    assert "Html object" in table.text
    failed = await sandbox.run_code("1 / 0")
    assert failed.error is not None
    assert (failed.error.name, failed.error.value) == ("ZeroDivisionError", "division by zero")

    await sandbox.set_timeout(120)
    await sandbox.files.make_dir("/tmp/d")
    await sandbox.files.write("/tmp/d/a", "text")
    assert await sandbox.files.read("/tmp/d/a", format="text") == "text"
    await sandbox.files.rename("/tmp/d/a", "/tmp/d/b")
    assert [each.name for each in await sandbox.files.list("/tmp/d")] == ["b"]
    assert (await sandbox.files.get_info("/tmp/d/b")).name == "b"
    await sandbox.files.remove("/tmp/d/b")
    assert not await sandbox.files.exists("/tmp/d/b")

    assert (await sandbox.get_info()).expires_at_unix is not None
    assert await sandbox.kill() is True
    assert daemon.service.running == {}


async def test_a_sandbox_is_found_by_its_name_and_its_labels(client: AsyncClient) -> None:
    web = await client.sandbox("warm", name="web", labels={"team": "search", "tier": "1"})
    await client.fork("warm", 2, labels={"team": "search"})
    await client.fork("other")

    assert (web.name, web.labels) == ("web", {"team": "search", "tier": "1"})
    assert (await AsyncSandbox.connect("web")).id == web.id
    found = client.sandboxes
    assert len(await found.list(labels={"team": "search"})) == 3
    assert [each.id for each in await found.list(labels={"team": "search", "tier": None})] == [
        web.id
    ]
    assert [each.id for each in await found.list(name="web", status="running")] == [web.id]
    assert await found.list("other", labels={"team": "search"}) == []
    with pytest.raises(InvalidRequest, match="status"):
        await found.list(status="lazy")  # type: ignore[arg-type]  # what is tested


async def test_a_long_list_comes_in_parts(client: AsyncClient, daemon: RunningDaemon) -> None:
    made = await client.fork("warm", 7, labels={"a": "b"})
    await client.fork("other", 2)

    found = [each.id async for each in client.sandboxes.iterate(labels={"a": "b"}, page_size=3)]

    assert sorted(found) == sorted(each.id for each in made)
    assert len([each async for each in client.sandboxes.iterate(page_size=9)]) == 9
    with pytest.raises(InvalidRequest, match="limit"):
        await anext(client.sandboxes.iterate(page_size=0))
    assert len(daemon.service.running) == 9


async def test_a_name_and_labels_can_be_changed_and_removed(sandbox: AsyncSandbox) -> None:
    assert (await sandbox.rename("web")).name == "web"
    assert (await sandbox.set_labels({"a": "b"})).labels == {"a": "b"}
    assert (sandbox.name, sandbox.labels) == ("web", {"a": "b"})
    assert (await sandbox.rename(None)).name is None
    assert (await sandbox.set_labels({})).labels == {}
    with pytest.raises(InvalidRequest, match="name"):
        await sandbox.rename("No Name")


async def test_the_end_of_a_sandbox_can_be_moved_and_removed(sandbox: AsyncSandbox) -> None:
    first = sandbox.info.expires_at_unix
    assert first is not None

    later = (await sandbox.set_ttl(3_600.0)).expires_at_unix
    assert later is not None
    assert later > first
    assert (await sandbox.set_ttl(None)).expires_at_unix is None
    await sandbox.set_timeout(60)
    assert sandbox.info.expires_at_unix is not None
    with pytest.raises(InvalidRequest, match=r"^ttl_s"):
        await sandbox.set_ttl(-1.0)


async def test_variables_and_labels_of_a_sandbox_are_its_programs_and_its_siblings(
    client: AsyncClient,
) -> None:
    source = await client.sandbox("warm", env={"A": "b"}, labels={"x": "y"}, name="web")

    (same,) = await source.branch()
    (other,) = await source.branch(labels={"z": ""})

    assert (await same.exec("env")).stdout == '{"A": "b"}'
    assert (same.labels, other.labels, same.name) == ({"x": "y"}, {"z": ""}, None)


async def test_a_paused_sandbox_keeps_its_memory_and_starts_nothing(
    client: AsyncClient, sandbox: AsyncSandbox
) -> None:
    await sandbox.eval("x = 7")

    paused = [await sandbox.pause(), await sandbox.pause()]
    assert [each.condition for each in paused] == ["paused", "paused"]
    assert [each.status for each in paused] == ["running", "running"]  # as older clients know it
    assert not await sandbox.is_running()
    assert [each.id for each in await client.sandboxes.list(status="paused")] == [sandbox.id]
    with pytest.raises(Conflict, match="resume"):
        await sandbox.run("echo")
    assert ((await sandbox.resume()).status, (await sandbox.resume()).status) == (
        "running",
        "running",
    )
    assert (await sandbox.eval("x")).value == 7


async def test_a_sandbox_is_waited_for_until_it_has_ended(
    sandbox: AsyncSandbox, daemon: RunningDaemon
) -> None:
    assert await sandbox.wait(timeout_s=0) is None
    assert await sandbox.wait(timeout_s=0.1) is None
    guest = daemon.service.running[SandboxId(sandbox.id)]
    guest.sandbox = replace(guest.sandbox, state=SandboxState.EXITED, exit_reason="ttl")
    assert await sandbox.wait() == "ttl"
    await sandbox.kill()
    assert await sandbox.wait() == "deleted"


async def test_code_contexts_are_those_of_e2b(sandbox: AsyncSandbox) -> None:
    context = await sandbox.create_code_context(cwd="/")
    assert (context.language, context.cwd) == ("python", "/")
    await sandbox.run_code("x = 1", context=context)
    assert (await sandbox.run_code("x", context=context)).text == "1"
    assert (await sandbox.eval("x", context=context.id)).value == 1
    other = await sandbox.run_code("x")
    assert other.error is not None
    assert [each.id for each in await sandbox.list_code_contexts()] == [context.id]

    again = await sandbox.restart_code_context(context)
    assert again == context
    emptied = await sandbox.run_code("x", context=again)
    assert emptied.error is not None
    assert await sandbox.remove_code_context(again)
    assert not await sandbox.remove_code_context(again.id)
    assert await sandbox.list_code_contexts() == []


async def test_a_code_context_that_cannot_be_made_is_one_error_and_none(
    sandbox: AsyncSandbox,
) -> None:
    with pytest.raises(InvalidRequest, match=r"cwd: FileNotFoundError: .*/nowhere"):
        await sandbox.create_code_context(cwd="/nowhere")
    assert await sandbox.list_code_contexts() == []
    with pytest.raises(Conflict, match="no runtime 'node'"):
        await sandbox.create_code_context(language="node")
    for name in ("", "A", "a" * 64):
        with pytest.raises(InvalidRequest) as refused:
            await sandbox.eval("1", context=name)
        assert refused.value.context["field"] == "context"
    for number in range(EVAL_CONTEXTS_MAX):
        await sandbox.eval("1", context=f"c{number}")
    with pytest.raises(InvalidRequest, match="64 contexts"):
        await sandbox.eval("1", context="more")
