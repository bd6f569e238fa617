"""Folders between this host and a sandbox, where a file is, the console, programs in a loop."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from forkd import AsyncClient, AsyncSandbox
from forkd.errors import HostError, InvalidRequest, NotFound
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.daemon import RunningDaemon


@pytest.fixture
async def sandbox(daemon: RunningDaemon) -> AsyncIterator[AsyncSandbox]:
    daemon.service.stored = some_snapshots("warm")
    async with AsyncClient(daemon.url) as client:
        yield await client.sandbox("warm")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder with a pipe, which cannot be read, and a link, which the fake cannot make."""
    tree = tmp_path / "tree"
    (tree / "deep/er").mkdir(parents=True)
    (tree / "deep/er/file").write_bytes(b"contents")
    (tree / "big").write_bytes(os.urandom(700_000))
    (tree / "link").symlink_to("deep/er/file")
    os.mkfifo(tree / "pipe")
    return tree


async def test_a_folder_goes_up_and_comes_down_as_it_was(
    sandbox: AsyncSandbox, tree: Path, tmp_path: Path
) -> None:
    up = await sandbox.files.upload(tree, "/home/app")
    down = await sandbox.files.download("/home/app", tmp_path / "back")

    assert up.skipped == [f"{tree}/pipe: a device, a pipe or a socket", "link: not a file"]
    assert (up.files, up.bytes) == (2, 700_008)
    assert (down.files, down.bytes, down.skipped) == (2, 700_008, [])
    assert (tmp_path / "back/deep/er/file").read_bytes() == b"contents"
    assert (tmp_path / "back/big").read_bytes() == (tree / "big").read_bytes()
    assert await sandbox.files.read("/home/app/deep/er/file") == b"contents"


async def test_a_file_goes_up_and_comes_down_under_its_new_name(
    sandbox: AsyncSandbox, tree: Path, tmp_path: Path
) -> None:
    await sandbox.files.upload(str(tree / "deep/er/file"), "/tmp/other", user="app")
    copied = await sandbox.files.download("/tmp/other", str(tmp_path / "third"))

    assert (copied.files, copied.bytes) == (1, 8)
    assert (tmp_path / "third").read_bytes() == b"contents"


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("nothing", "/tmp/x", "nothing: no such file or folder"),
        ("tree/pipe", "/tmp/x", "pipe: neither a file nor a folder"),
        ("tree/big", "/", "'/' does not name a file"),
    ],
)
async def test_what_cannot_be_uploaded_is_refused(
    sandbox: AsyncSandbox, tree: Path, source: str, target: str, said: str
) -> None:
    with pytest.raises((NotFound, InvalidRequest), match=said):
        await sandbox.files.upload(tree.parent / source, target)


async def test_what_cannot_be_downloaded_is_refused(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    await sandbox.files.make_dir("/tmp/d", parents=True)

    with pytest.raises(NotFound):
        await sandbox.files.download("/tmp/nothing", tmp_path / "x")
    with pytest.raises(HostError, match="No such file or directory"):
        await sandbox.files.download("/tmp/d", tmp_path / "no/such/folder")


async def test_an_entry_says_where_it_is(sandbox: AsyncSandbox) -> None:
    odd = os.fsdecode(b"/tmp/d/caf\xe9")
    await sandbox.files.make_dir("/tmp/d", parents=True)
    await sandbox.files.write(odd, b"1")

    (entry,) = await sandbox.files.list("/tmp/d")

    assert (entry.path, (await sandbox.files.stat("/tmp/d/")).path) == (odd, "/tmp/d/")
    assert await sandbox.files.read(entry.path) == b"1"
    assert "caf\ufffd" in entry.model_dump_json()


async def test_a_program_can_be_iterated_alone(sandbox: AsyncSandbox) -> None:
    process = sandbox.exec_stream("echo", "hi")

    received = [output.data async for output in process]

    assert b"".join(received) == b"hi\n"
    assert process.exit is not None
    assert process.exit.exit_code == 0
    assert [output.data async for output in process] == [], "it ran once"


async def test_a_program_can_be_waited_for_alone(sandbox: AsyncSandbox) -> None:
    assert (await sandbox.exec_stream("echo", "hi").wait()).exit_code == 0


async def test_the_console_is_text(sandbox: AsyncSandbox) -> None:
    text = await sandbox.console()
    followed = sandbox.follow_console()

    assert text == (await sandbox.logs()).decode()
    assert text
    assert (await anext(followed)).startswith(text)
