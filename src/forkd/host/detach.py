"""Go on in a process of its own, of which whoever started it reads one line first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from forkd.host import folders
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def detached(
    work: Callable[[Callable[[bytes], None]], int], log_file: Path | None, line_bytes_max: int
) -> bytes:
    """Do `work` in a child in a session of its own; return the line that it tells, without it "".

    The child exits with what `work` returns.  It has no input, and its outputs are the end of
    `log_file`, or nothing without one.

    Args:
        work: Is given what tells the line, once.
        log_file: The file; its folder is made.
        line_bytes_max: The longest line.

    Raises:
        HostError: The kernel does not let us, or the file cannot be written.
        CapacityError: There are too many processes, or too little memory.
    """
    with kernel_call("start a process in the background"):
        nothing, output = _streams(log_file)
        reader, writer = os.pipe()
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        _work(work, writer, (nothing, output, output))
    for each in {writer, nothing, output}:
        os.close(each)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.readline(line_bytes_max)


def _streams(log_file: Path | None) -> tuple[int, int]:
    nothing = os.open(os.devnull, os.O_RDWR)
    if log_file is None:
        return nothing, nothing
    folders.make(log_file.parent)
    return nothing, os.open(log_file, _APPEND, 0o600)


def _work(
    work: Callable[[Callable[[bytes], None]], int], writer: int, streams: tuple[int, ...]
) -> NoReturn:
    status = 1
    try:
        os.setsid()
        for number, each in enumerate(streams):
            os.dup2(each, number)

        def tell(line: bytes) -> None:
            os.write(writer, line)
            os.close(writer)

        status = work(tell)
    finally:
        os._exit(status)


def reopen_outputs(log_file: Path) -> None:
    """Point both outputs of this process at the file that has the log's name now.

    Raises:
        HostError: It cannot be written.
    """
    with kernel_call(f"open the log {log_file}"):
        output = os.open(log_file, _APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
