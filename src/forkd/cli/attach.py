"""Connect a program in a guest to this process's streams, terminal and signals.

Three threads at most: the main one passes on output, one pumps standard input, and one sends
signals.  The latter exists because a signal handler may interrupt anything, a send included, and
because the interpreter runs handlers in the main thread alone: one that came just before that
thread began to wait for output would run with the next output, or never.  The interpreter's
wakeup descriptor (`signal.set_wakeup_fd`) has every number at once, whatever any thread does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from forkd.errors import ForkdError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from forkd.sdk import Process, Sandbox
    from forkd.sdk._requests import ExecOptions
    from forkd.wire.v2 import ExecExit

READ_BYTES = 64 * 1024

SIZE_UNKNOWN = (24, 80)
"""Rows and columns of a terminal that does not say, as one on a serial line does not."""


def _signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return the signals of these names that this system has; Windows has few."""
    return tuple(each for each in signal.Signals if each.name in names)


PASSED_ON = _signals("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that the program gets in our place, unless it has a terminal, where keys do that."""

_PASSED_ON_WITH_TTY = _signals("SIGWINCH", "SIGTERM", "SIGHUP")


def attached(  # noqa: PLR0913 - what a program is run with
    sandbox: Sandbox,
    args: Sequence[str],
    options: ExecOptions,
    *,
    tty: bool,
    stdin: bool,
    timeout_s: float | None,
) -> ExecExit:
    """Run a program with our own streams and return how it ended.

    Raises:
        InvalidRequest: `tty` was asked for with input, and standard input is no terminal.
        ForkdError: The program could not be started, or was lost.
    """
    typed = tty and stdin
    if typed and not sys.stdin.isatty():
        raise InvalidRequest(
            "--tty needs a terminal as standard input; leave out --tty to pipe input, or add "
            "--no-stdin to have a terminal without input",
            field="tty",
        )
    size = _size() if tty else None
    program = sandbox.exec_stream(args, stdin=stdin, tty=size, timeout_s=timeout_s, **options)
    with program as process, ExitStack() as stack:
        stack.enter_context(signals_passed_on(process, _PASSED_ON_WITH_TTY if tty else PASSED_ON))
        if tty and (now := _size()) != size:
            process.resize(*now)  # a change of before its signal was passed on
        if typed:
            stack.enter_context(_raw(sys.stdin.fileno()))
            _thread(_pump_keys, process, sys.stdin.fileno())
        elif stdin:
            _thread(_pump_input, process, sys.stdin.fileno())
        for output in process:
            write_all(1 if output.stream == "stdout" else 2, output.data)
        return process.wait()


def _thread(target: object, *args: object) -> None:
    """Run a pump in a thread that ends with this process: it may wait for a key for ever."""
    threading.Thread(target=target, args=args, daemon=True).start()  # type: ignore[arg-type]


def _pump_input(process: Process, descriptor: int) -> None:
    try:
        while data := os.read(descriptor, READ_BYTES):
            process.write(data)
        process.close_stdin()
    except (ForkdError, OSError):
        return  # the program has ended, which the main thread hears of itself


def _pump_keys(process: Process, descriptor: int) -> None:
    """Pass on what is typed.  A terminal in raw mode ends only when it is closed."""
    with suppress(ForkdError):
        with suppress(OSError):
            while data := os.read(descriptor, READ_BYTES):
                process.write(data)
        process.send_signal(signal.SIGHUP)
        process.close_stdin()


def _send_signals(
    process: Process, numbers: socket.socket, watched: Sequence[signal.Signals]
) -> None:
    """Send each watched signal whose number comes, until the other end of `numbers` is closed."""
    with numbers:
        while (number := int.from_bytes(numbers.recv(1))) != 0:
            if number not in watched:
                continue  # one that has a handler of somebody else's
            # If the program has ended the main thread hears of it itself, and numbers are still to
            # be read: the interpreter complains of a wakeup descriptor that nobody reads.
            with suppress(ForkdError):
                if number in _signals("SIGWINCH"):
                    process.resize(*_size())
                else:
                    process.send_signal(number)


@contextmanager
def signals_passed_on(process: Process, watched: Sequence[signal.Signals]) -> Iterator[None]:
    """Send the signals that concern the program to it instead of dying of them."""
    numbers, written = socket.socketpair()
    written.settimeout(0)  # as the interpreter demands: a handler must never wait
    wakeup_before = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, _pass_on) for number in watched}
    _thread(_send_signals, process, numbers, watched)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        written.close()


def _pass_on(_: int, __: FrameType | None) -> None:
    """Do nothing: the wakeup descriptor has the number, but only of signals with a handler."""


@contextmanager
def _raw(descriptor: int) -> Iterator[None]:
    """Let every key reach the program, those typed ahead too; at the end all is as before."""
    import termios  # noqa: PLC0415 - Unix's alone, and only a terminal needs it
    import tty as terminal  # noqa: PLC0415 - as above

    before = termios.tcgetattr(descriptor)
    terminal.setraw(descriptor, termios.TCSADRAIN)
    try:
        yield
    finally:
        with suppress(termios.error):  # it may have been closed
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _size() -> tuple[int, int]:
    """Return rows and columns of our terminal: standard input, else output, if one is one."""
    for stream in (sys.stdin, sys.stdout):
        with suppress(OSError, ValueError):
            columns, rows = os.get_terminal_size(stream.fileno())
            return rows or SIZE_UNKNOWN[0], columns or SIZE_UNKNOWN[1]
    return SIZE_UNKNOWN


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, now."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
