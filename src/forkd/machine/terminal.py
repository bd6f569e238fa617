"""Give a command in the helper machine the user's own terminal."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import termios
import tty
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from forkd.machine import client, executor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from forkd.machine.machine import Machine


def run_in_terminal(
    machine: Machine, args: Sequence[str], *, env: Mapping[str, str], cwd: str
) -> int:
    """Run a command inside on the terminal that standard input is; return its exit code.

    Every key, Ctrl-C included, goes to the command.  The terminal is as it was
    when this returns or raises.
    """
    message = client.exec_message(args, env=env, cwd=cwd, tty=_size())
    with client.connect(machine.endpoint, message) as connection:

        def resized(_signal: int, _frame: object) -> None:
            with suppress(OSError):
                frame = executor.encode_json(executor.CONTROL, {"resize": _size()})
                connection.sendall(frame)

        before = signal.signal(signal.SIGWINCH, resized)
        try:
            with _raw(sys.stdin.fileno()):
                client.feed(connection, sys.stdin.fileno())
                return client.exchange(connection, _show, _show)
        finally:
            signal.signal(signal.SIGWINCH, before)


def _size() -> dict[str, int]:
    columns, rows = shutil.get_terminal_size()
    return {"rows": rows, "columns": columns}


def _show(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]


@contextmanager
def _raw(descriptor: int) -> Iterator[None]:
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
