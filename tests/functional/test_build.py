"""Builds of Dockerfiles by a daemon over the fake VMM: what is done again, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from forkd import AsyncClient
from forkd.errors import BuildError, Conflict, ForkdError, InvalidRequest, NotFound
from forkd.sdk._async import builds
from forkd.sdk._async.sandbox import fork_one
from tests.support.served_host import Served, served_host
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from forkd import AsyncSandbox
    from forkd.sdk._async.http import AsyncHttp
    from forkd.sdk._requests import NamedForkOptions
    from forkd.types import BuildResult
    from tests.support.service_host import FakeHost

TWELVE = """\
FROM python
WORKDIR /srv
ENV MODE=test
COPY one.txt .
COPY folder/ folder
RUN echo six
RUN echo seven
RUN echo eight
ADD two.txt /etc/two
RUN echo ten
RUN echo eleven
RUN echo twelve
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "app"
    (folder / "folder" / "deep").mkdir(parents=True)
    for name in ("one.txt", "two.txt", "folder/three.txt", "folder/deep/four.txt"):
        (folder / name).write_text(f"{name}\n")
    return folder


@pytest.fixture
async def served(fake_host: FakeHost) -> AsyncIterator[Served]:
    async with served_host(fake_host) as served:
        yield served
        assert await served.sandboxes() == []


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(served.url) as client:
        yield client


async def build(client: AsyncClient, folder: Path, text: str, **options: object) -> BuildResult:
    (folder / "Dockerfile").write_text(text)
    return await client.builds.build(folder, **options)  # type: ignore[arg-type]


def done(made: BuildResult) -> list[int]:
    """Return the lines of the steps that were done, not found."""
    return [each.line for each in made.steps if each.changes_files and not each.cached]


async def test_a_changed_instruction_is_done_again_with_those_behind_it(
    client: AsyncClient, folder: Path
) -> None:
    made = await build(client, folder, TWELVE, tag="app")
    assert done(made) == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert [each.number for each in made.steps] == list(range(1, 13))
    depth = made.snapshot.chain_depth
    assert depth == 10

    before = {each.tag for each in await client.snapshots.list()}
    again = await build(client, folder, TWELVE, tag="app")
    assert done(again) == []
    assert again.snapshot == made.snapshot
    assert {each.tag for each in await client.snapshots.list()} == before

    changed = await build(client, folder, TWELVE.replace("echo ten", "echo 10"), tag="app")
    assert done(changed) == [10, 11, 12]
    after = {each.tag for each in await client.snapshots.list()}
    assert len(after - before) == 3
    (folder / "folder" / "deep" / "four.txt").write_text("other\n")
    assert done(await build(client, folder, TWELVE)) == [5, 6, 7, 8, 9, 10, 11, 12]


async def test_what_is_copied_is_where_the_dockerfile_says(
    client: AsyncClient, folder: Path
) -> None:
    text = TWELVE + (
        "COPY one.txt two.txt /many/\nCOPY one.txt /named\nCOPY folder /etc\n"
        "COPY <<there /\ntext $MODE\nthere\n"
    )
    await build(client, folder, text, tag="app")
    async with await client.sandbox("app") as sandbox:
        for path, content in {
            "/srv/one.txt": "one.txt\n",
            "/srv/folder/three.txt": "folder/three.txt\n",
            "/srv/folder/deep/four.txt": "folder/deep/four.txt\n",
            "/etc/two": "two.txt\n",
            "/many/two.txt": "two.txt\n",
            "/named": "one.txt\n",
            "/etc/deep/four.txt": "folder/deep/four.txt\n",
            "/there": "text test\n",
        }.items():
            assert await sandbox.files.read_text(path) == content, path


async def test_a_stage_copies_from_another(client: AsyncClient, folder: Path) -> None:
    first = "FROM python AS Build\nCOPY folder /out\n"
    text = (
        f"{first}RUN echo made\n"
        "FROM python AS unused\nRUN exit 1\n"
        "FROM python\nCOPY --from=build /out/three.txt /bin/tool\nCOPY --from=0 /out /all\n"
        "COPY --from=build /out/t*.txt /some/\n"
    )
    made = await build(client, folder, text, tag="app")
    assert done(made) == [2, 3, 7, 8, 9]
    async with await client.sandbox("app") as sandbox:
        for path in ("/bin/tool", "/all/three.txt", "/some/three.txt"):
            assert await sandbox.files.read_text(path) == "folder/three.txt\n"
        assert await sandbox.files.exists("/all/deep/four.txt")
    assert done(await build(client, folder, text, tag="other")) == []
    for source in ("/missing", "/out/x*"):
        with pytest.raises(BuildError, match=rf"^Dockerfile:5: COPY: .*{source.strip('*')}"):
            await build(client, folder, f"{first}FROM python\n\nCOPY --from=0 {source} /x\n")


async def test_an_image_says_what_programs_in_forks_begin_with(
    client: AsyncClient, folder: Path
) -> None:
    text = (
        'FROM python\nENV A=1\nWORKDIR /srv\nUSER app\nLABEL a=b\nEXPOSE 80\nENTRYPOINT ["run"]\n'
        'CMD ["fast"]\nHEALTHCHECK --retries=3 CMD check\n'
    )
    made = await build(client, folder, text, tag="app")
    config = (await client.snapshots.info("app")).config
    assert config is not None
    assert (config.env["A"], config.cwd, config.user) == ("1", "/srv", "app")
    assert (config.entrypoint, config.cmd, config.ports) == (["run"], ["fast"], ["80/tcp"])
    assert config.healthcheck == {"test": ["CMD-SHELL", "check"], "retries": "3"}
    above = await build(client, folder, 'FROM app\nENV B=$A\nCMD ["slow"]\n', tag="above")
    found = (await client.snapshots.info("above")).config
    assert found is not None
    assert (found.env["B"], found.cwd, found.cmd) == ("1", "/srv", ["slow"])
    assert above.snapshot.chain_depth == made.snapshot.chain_depth + 1
    assert done(await build(client, folder, text.replace("a=b", "a=c"), tag="labelled")) == []


async def test_a_failed_step_leaves_the_links_before_it_and_nothing_else(
    client: AsyncClient, folder: Path
) -> None:
    text = "FROM python\nRUN echo one\n\nRUN exit 3\nRUN echo three\n"
    before = {each.tag for each in await client.snapshots.list()}
    with pytest.raises(BuildError, match=r"^Dockerfile:4: RUN exit 3: exited with 3\n"):
        await build(client, folder, text, tag="app")
    left = [each for each in await client.snapshots.list() if each.tag not in before]
    assert [each.cached for each in left] == [True]
    assert done(await build(client, folder, text.replace("exit 3", "echo 3"))) == [4, 5]


async def test_a_build_without_the_cache_does_every_step(client: AsyncClient, folder: Path) -> None:
    text = "FROM python\nRUN echo one\nRUN echo two\n"
    await build(client, folder, text)
    assert done(await build(client, folder, text, cache=False, tag="app")) == [2, 3]
    assert done(await build(client, folder, text)) == []


async def test_only_programs_have_the_network_that_a_build_is_given(
    client: AsyncClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    async def offline(http: AsyncHttp, tag: str, options: NamedForkOptions) -> AsyncSandbox:
        asked.append(options.get("network"))
        assert not options.get("secrets")
        return await fork_one(http, tag, {**options, "network": None})  # the fake host has no taps

    monkeypatch.setattr(builds, "fork_one", offline)
    text = "FROM python\nCOPY one.txt /\nRUN echo one\nCOPY two.txt /\n"
    await build(client, folder, text, network="internet", tag="app")
    assert asked == [None, "internet", None, None]


async def test_a_tag_that_is_no_builds_or_in_use_is_not_taken(
    client: AsyncClient, folder: Path
) -> None:
    with pytest.raises(Conflict, match="snapshot python exists, and no build made it"):
        await build(client, folder, "FROM python\nRUN echo one\n", tag="python")
    await build(client, folder, "FROM python\nRUN echo one\n", tag="app")
    async with await client.sandbox("app") as sandbox:
        with pytest.raises(Conflict, match=rf"app is needed by {sandbox.id}"):
            await build(client, folder, "FROM python\nRUN echo two\n", tag="app")
        assert done(await build(client, folder, "FROM python\nRUN echo one\n", tag="app")) == []
    made = await build(client, folder, "FROM python\nRUN echo two\n", tag="app")
    assert done(made) == [2]
    with pytest.raises(Conflict, match="the build begins with snapshot app"):
        await build(client, folder, "FROM app\nRUN echo three\n", tag="app")
    with pytest.raises(InvalidRequest, match="is kept for snapshots of the daemon"):
        await build(client, folder, "FROM python\n", tag=f"image-{'0' * 12}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM python\nRUN echo one\nONBUILD RUN x", "Dockerfile:3: ONBUILD is not supported"),
        ("FROM python\nRUN echo one\nCOPY ../x /", "Dockerfile:3: COPY: '../x' leads out"),
        ("FROM python\nRUN echo one\nCOPY nothing /", "Dockerfile:3: COPY: no 'nothing' in"),
        ("FROM python\nRUN echo one\nCOPY --from=x /a /", "Dockerfile:3: --from=x: there is no"),
        ("FROM python\nRUN echo one\nRUN <<EOF\na", "Dockerfile:3: the heredoc <<EOF is cut"),
        ("FROM $X\nRUN echo one", "Dockerfile:1: FROM \\$X needs X, which is not set"),
    ],
)
async def test_what_is_wrong_is_refused_before_anything_is_built(
    text: str, message: str, client: AsyncClient, folder: Path
) -> None:
    before = await client.snapshots.list()
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        await build(client, folder, text)
    assert await client.snapshots.list() == before


async def test_what_a_build_needs_and_is_not_there_is_named(
    client: AsyncClient, folder: Path
) -> None:
    with pytest.raises(NotFound, match="there is no Dockerfile at"):
        await client.builds.build(folder)
    with pytest.raises(NotFound, match=r"the build context .* does not exist"):
        await client.builds.build(folder / "nothing")
    with pytest.raises(ForkdError, match=r"^Dockerfile:1: \./missing\.tar: no image at"):
        await build(client, folder, "FROM ./missing.tar\n")
    with pytest.raises(InvalidRequest, match="warm: the image has no ENTRYPOINT and no CMD"):
        await build(client, folder, "FROM python\n", warm=True)
    with pytest.raises(InvalidRequest, match="ready goes with warm"):
        await build(client, folder, "FROM python\n", ready="true")


async def run_cli(served: Served, *args: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forkd", "build", *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "FORKD_URL": served.url},
    )
    said, errors = await process.communicate()
    return process.returncode or 0, said.decode(), errors.decode()


async def test_the_command_shows_a_line_for_each_instruction(served: Served, folder: Path) -> None:
    (folder / "Dockerfile").write_text(TWELVE)
    code, said, errors = await run_cli(served, "-t", "app", str(folder))
    lines = errors.splitlines()
    assert (code, said) == (0, ""), errors
    assert lines[0] == "[ 1/12] FROM python"
    assert lines[5].startswith("[ 6/12] RUN echo six  ")
    assert lines[5].endswith("s")
    assert lines[-1] == "snapshot app: 9 steps done, 0 cached"
    code, said, errors = await run_cli(served, "-t", "app", "--json", str(folder))
    assert [each["cached"] for each in json.loads(said)["steps"]].count(True) == 9
    (folder / "Dockerfile").write_text("FROM python\nRUN exit 4\n")
    code, said, errors = await run_cli(served, str(folder), "--build-arg", "NONE=1")
    assert (code, errors.splitlines()[0][:60]) == (
        2,
        "error: Dockerfile:1: no ARG declares the build argument 'NON",
    )


async def test_an_interrupted_command_leaves_nothing(served: Served, folder: Path) -> None:
    (folder / "Dockerfile").write_text('FROM python\nRUN ["forever"]\n')
    before = (await served.http.get("/v2/snapshots")).json()
    logs = served.host.settings.sandboxes_dir
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forkd", "build", "-t", "app", str(folder)),
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "FORKD_URL": served.url},
    )
    try:
        await until(
            lambda: any("forever began" in path.read_text() for path in logs.rglob("*.log"))
        )
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await until(lambda: served.host.left_over() == [])
    assert [each["tag"] for each in (await served.http.get("/v2/snapshots")).json()] == [
        each["tag"] for each in before
    ]
