"""A program in a guest has this terminal's keys, size and signals, and gives them back."""

from __future__ import annotations

import os
import queue
import signal
import sys
import termios
import threading
from typing import TYPE_CHECKING, cast

import pytest

from forkd.cli import attach
from forkd.errors import Conflict
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forkd.sdk import Process
    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]


@pytest.fixture
def sandbox(daemon: RunningDaemon, forkd: Forkd) -> str:
    daemon.service.stored = some_snapshots("warm")
    return forkd("fork", "warm").out.strip()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The far end of a terminal of which the near end is standard input."""
    far, near = os.openpty()
    with os.fdopen(near, "r+b", buffering=0) as file:
        monkeypatch.setattr(sys, "stdin", file)
        yield far
        os.close(far)  # ends whoever still reads the near end


def when_fed(daemon: RunningDaemon, act: Callable[[], object]) -> threading.Thread:
    """Do something once the program has had input, and so our signals are its own.

    In a thread of its own: a signal that it raises does not interrupt the main thread, which is
    how one looks that comes just before that thread begins to wait.
    """

    def wait_and_act() -> None:
        daemon.wait_for(lambda: daemon.service.exec_fed)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_the_programs_to_die_of(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    sender = when_fed(daemon, lambda: signal.raise_signal(number))

    ended = forkd("exec", sandbox, "sleep", stdin=b"go")

    sender.join()
    assert ended.code == 128 + number
    assert signal.getsignal(number) is before


def test_a_terminal_has_its_size_and_its_changes_are_told(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str, terminal: int
) -> None:
    def resize() -> None:
        termios.tcsetwinsize(terminal, (50, 132))
        signal.raise_signal(signal.SIGWINCH)

    sender = when_fed(daemon, resize)
    os.write(terminal, b"x")

    ended = forkd("exec", "--tty", sandbox, "size", keep_stdin=True)

    sender.join()
    request = daemon.service.execs[0].request
    assert request.tty is not None
    assert (ended.code, ended.out) == (0, "50x132")


def test_keys_reach_the_program_raw_and_the_terminal_is_as_before(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str, terminal: int
) -> None:
    """Ctrl-C is a byte for the program to see, and what was typed ahead is not lost."""
    before = termios.tcgetattr(terminal)
    sender = when_fed(daemon, lambda: os.write(terminal, b"\x03"))
    os.write(terminal, b"a")

    ended = forkd("exec", "--tty", sandbox, "until-ctrl-c", keep_stdin=True)

    sender.join()
    assert (ended.code, ended.out) == (0, "a\x03")
    assert termios.tcgetattr(terminal) == before


def test_a_terminal_that_is_closed_hangs_up_on_the_program(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str, terminal: int
) -> None:
    def close() -> None:
        with open(os.devnull, "rb") as other:  # noqa: PTH123 - a name for its descriptor
            os.dup2(other.fileno(), terminal)  # the fixture closes the number

    os.write(terminal, b"key")
    closer = when_fed(daemon, close)

    ended = forkd("exec", "-t", sandbox, "sleep", keep_stdin=True)

    closer.join()
    assert ended.code == 128 + signal.SIGHUP


def test_a_size_that_changes_as_the_program_starts_is_told(
    forkd: Forkd, sandbox: str, terminal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    termios.tcsetwinsize(terminal, (24, 80))
    sizes = iter([termios.tcgetwinsize(terminal), (50, 132)])
    monkeypatch.setattr(attach, "_size", lambda: next(sizes))

    ended = forkd("exec", "-t", sandbox, "size", keep_stdin=True)

    assert (ended.code, ended.out, ended.err) == (0, "50x132", "")


def test_without_input_a_terminal_needs_none_here(forkd: Forkd, sandbox: str) -> None:
    refused = forkd("exec", "-t", sandbox, "true", stdin=b"piped")
    run = forkd("exec", "-t", "-n", sandbox, "echo", "on")

    assert (refused.code, "--no-stdin" in refused.err) == (125, True)
    assert (run.code, run.out) == (0, "on\n")


def test_a_reader_that_leaves_ends_the_program(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int, __: bytes) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("forkd.cli.attach.write_all", refuse)

    ended = forkd("exec", sandbox, "spew", "100000000")

    assert ended.code == 128 + signal.SIGPIPE
    daemon.wait_for(lambda: daemon.service.execs[0].closed)


def test_signals_are_taken_though_the_program_has_ended(capfd: pytest.CaptureFixture[str]) -> None:
    class Gone:
        sent: queue.SimpleQueue[int] = queue.SimpleQueue()

        def send_signal(self, number: int) -> None:
            self.sent.put(number)
            raise Conflict("the program has ended")

    program = Gone()
    with attach.signals_passed_on(cast("Process", program), [signal.SIGHUP]):
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
            assert program.sent.get(timeout=30) == signal.SIGHUP

    assert capfd.readouterr().err == ""
