"""What a machine's process puts in its folder costs the daemon neither time, memory nor secrets."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from forkd.engine.process import LOG_TAIL_BYTES_MAX, last_words, log_tail
from forkd.errors import HostError
from forkd.model.sandbox import ForkOptions, SandboxState
from forkd.service.sandboxes import console
from forkd.service.sandboxes.console import CONSOLE_BYTES_MAX
from tests.support.callers import CALLER
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.service_host import FakeHost


def link(path: Path) -> None:
    """Put a link to a file of the host there."""
    secret = path.parent.parent / "secret"
    secret.write_text("the host's own")
    path.symlink_to(secret)


def fifo(path: Path) -> None:
    """Put a FIFO there that nobody writes to."""
    os.mkfifo(path)


def listener(path: Path) -> None:
    """Put a socket there."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


HOSTILE = pytest.mark.parametrize("put", [link, fifo, listener])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a machine."""
    made = tmp_path / "machine"
    made.mkdir()
    return made


@HOSTILE
def test_a_console_that_is_no_file_is_refused_at_once(
    folder: Path, put: Callable[[Path], None]
) -> None:
    put(folder / "console.log")

    with pytest.raises(HostError, match=r"cannot read .*/console\.log"):
        console.read(folder)


@HOSTILE
def test_a_log_that_is_no_file_says_nothing(folder: Path, put: Callable[[Path], None]) -> None:
    put(folder / "vmm.log")

    assert last_words(folder) == ""
    assert log_tail(folder / "vmm.log") == "it logged nothing"


def test_a_folder_that_is_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(folder)
    (folder / "vmm.log").write_text("words\n")

    assert last_words(folder) == "words"
    assert last_words(elsewhere) == ""


def test_a_huge_console_is_read_up_to_its_limit(folder: Path) -> None:
    with (folder / "console.log").open("wb") as file:
        file.write(b"x" * CONSOLE_BYTES_MAX + b"y")
        file.truncate(1 << 40)

    assert console.read(folder) == b"x" * CONSOLE_BYTES_MAX


def test_the_last_words_of_a_huge_log_are_its_end(folder: Path) -> None:
    with (folder / "vmm.log").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"z" * LOG_TAIL_BYTES_MAX + b"w")

    assert last_words(folder) == "z" * (LOG_TAIL_BYTES_MAX - 1) + "w"


async def test_a_sandbox_that_puts_a_fifo_in_the_place_of_its_logs_ends_as_any_other(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (hostile,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        directory = fake_host.settings.sandboxes_dir / hostile.id
        for name in ("console.log", "vmm.log"):
            (directory / name).unlink(missing_ok=True)
            os.mkfifo(directory / name)

        async with asyncio.timeout(30):
            with pytest.raises(HostError, match="it is a FIFO, not a regular file"):
                await service.sandboxes.console_log(CALLER, hostile.id)
            followed = service.sandboxes.follow_console_log(CALLER, hostile.id)
            with pytest.raises(HostError, match="it is a FIFO, not a regular file"):
                async with aclosing(followed) as pieces:
                    await anext(pieces)
            assert hostile.pid is not None
            os.kill(hostile.pid, 9)

            roster = service.sandboxes.roster

            def ended() -> bool:
                return roster.get(CALLER, hostile.id).sandbox.state is SandboxState.EXITED

            await until(ended)
        await service.sandboxes.delete(CALLER, hostile.id)
    assert fake_host.left_over() == []
