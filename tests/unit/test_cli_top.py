"""`forkd top` in a terminal, over a service of a thousand sandboxes, and where there is none."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING, Self

import pytest

from forkd.model.ids import Tag
from forkd.model.network import HOST
from forkd.model.sandbox import ForkOptions
from tests.support.service_host import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

DEADLINE_S = 15.0

THOUSAND = 1_000


@pytest.fixture(autouse=True)
def sandboxes(daemon: RunningDaemon) -> list[str]:
    """A thousand, of which each uses more than the one before."""
    return [
        daemon.service.fork_one(Tag("warm"), ForkOptions(network=HOST)).id for _ in range(THOUSAND)
    ]


class Terminal:
    """`forkd top` in a pseudo-terminal."""

    def __init__(self, url: str, *args: str, rows: int = 24, columns: int = 120) -> None:
        self._ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.said = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.resize(rows, columns, tell=False)
        environment = {**os.environ, "FORKD_URL": url, "TERM": "xterm", "PYTHONPATH": f"{ROOT}/src"}
        for name in ("LINES", "COLUMNS"):
            environment.pop(name, None)
        self.process = subprocess.Popen(  # noqa: S603 - our own
            [sys.executable, "-c", "from forkd.cli.main import main; main()", "top", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )

    def resize(self, rows: int, columns: int, *, tell: bool = True) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)
        if tell:
            self.process.send_signal(signal.SIGWINCH)

    def read_until(self, condition: Callable[[str], bool]) -> str:
        """Return what was said since the last time, once it is what is waited for."""
        self.said, until_s = "", time.monotonic() + DEADLINE_S
        while not condition(self.said):
            left_s = until_s - time.monotonic()
            assert left_s > 0, self.said
            if select.select([self._ours], [], [], left_s)[0]:
                self.said += self._decoder.decode(os.read(self._ours, 65536))
        return self.said

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def ended(self) -> int:
        """Return the exit status, and see that the terminal is as it was."""
        until_s = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < until_s:
            if select.select([self._ours], [], [], 0.05)[0]:
                self.said += self._decoder.decode(os.read(self._ours, 65536))
        status = self.process.wait(0)
        assert termios.tcgetattr(self._theirs) == self.before
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(DEADLINE_S)
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminal(daemon: RunningDaemon) -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as stack:
        yield lambda *args, **size: stack.enter_context(Terminal(daemon.url, *args, **size))


def ids(screen: str) -> list[str]:
    return re.findall(r"sb-[a-z2-7]{9,26}", screen)


def last_screen(said: str) -> str:
    return said.rpartition("sandboxes")[2]


def whole(rows: int) -> Callable[[str], bool]:
    return lambda said: len(ids(last_screen(said))) >= rows


def test_as_many_rows_as_fit_are_shown_and_the_totals_of_all(
    terminal: Callable[..., Terminal], sandboxes: list[str]
) -> None:
    top = terminal(rows=24)
    said = top.read_until(whole(21))
    assert ids(said) == sorted(ids(said))  # nobody has a share of the CPU yet
    assert "1000 sandboxes" in said
    assert "memory 488.8 GiB" in said

    said = top.read_until(lambda said: "cpu 0.0 %" not in said and whole(21)(said))
    assert len(ids(last_screen(said))) == 21
    assert sandboxes[-1].startswith(ids(last_screen(said))[0])

    top.press("q")
    assert top.ended() == 0


def test_another_size_has_another_number_of_rows_at_once(
    terminal: Callable[..., Terminal],
) -> None:
    top = terminal(rows=10)
    assert len(ids(last_screen(top.read_until(whole(7))))) == 7

    top.resize(40, 120)
    assert len(ids(last_screen(top.read_until(whole(37))))) == 37

    top.press("q")
    assert top.ended() == 0


@pytest.mark.parametrize("how", ["key", "signal"])
def test_ctrl_c_ends_it_and_the_terminal_is_as_it_was(
    terminal: Callable[..., Terminal], how: str
) -> None:
    top = terminal()
    top.read_until(whole(21))
    if how == "signal":
        top.process.send_signal(signal.SIGINT)
    else:
        top.press("xyq")
    assert top.ended() == 0
    assert "\x1b[?1049l" in top.said  # the screen from before is back
    assert "\x1b[?25h" in top.said  # and so is the cursor


def test_a_narrow_terminal_is_no_error(terminal: Callable[..., Terminal]) -> None:
    top = terminal(rows=4, columns=20)
    top.read_until(lambda said: "sb-" in said)
    top.press("q")
    assert top.ended() == 0


def test_a_daemon_that_is_not_there_is_an_error_and_no_screen(
    terminal: Callable[..., Terminal], daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "url", "http://127.0.0.1:1")
    top = terminal()
    said = top.read_until(lambda said: "no daemon answers" in said)
    assert top.ended() == 7
    assert "\x1b[?1049h" not in said


def test_without_a_terminal_it_is_one_table(
    forkd: Callable[..., Ended], sandboxes: list[str]
) -> None:
    ended = forkd("top", "--sort", "memory")

    totals, head, first, *rest = ended.out.splitlines()
    assert (ended.code, len(rest)) == (0, THOUSAND - 1)
    assert "1000 sandboxes" in totals
    assert head.split()[:4] == ["ID", "SNAPSHOT", "CPU", "%"]
    assert first.split()[0] == sandboxes[-1]
    assert "≤ 1000 MiB" in first
    assert "1 MiB" in rest[-1]


def test_one_document_has_every_figure_and_the_share_of_the_cpu(
    forkd: Callable[..., Ended], sandboxes: list[str]
) -> None:
    found = forkd("top", "--json").document

    assert [each["id"] for each in found] == sandboxes[::-1]
    assert found[0]["cpu_percent"] > found[-1]["cpu_percent"] > 0
    assert found[0]["memory_private_bytes"] == THOUSAND << 20
