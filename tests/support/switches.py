"""What the scheduler did with some threads, out of the kernel's tracer (`trace/events.rst`)."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.mounts import mounted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

BUFFER_KB = 8 << 10
"""For each processor; what does not fit pushes out what is oldest."""

SWITCH = re.compile(r" next_pid=(\d+) next_prio=(\d+)")

PRIORITY_OF_NICE_0 = 120

PRIORITY_OF_FIFO_0 = 99
"""That of `SCHED_FIFO` with priority `n` is `n` below it."""


@contextlib.contextmanager
def switches_to(threads: Collection[int]) -> Iterator[dict[int, set[int]]]:
    """Note with which of the kernel's priorities each thread is given a processor in the block.

    What is yielded is filled when the block ends.
    """
    with tracer() as instance:
        event = instance / "events" / "sched" / "sched_switch"
        (instance / "buffer_size_kb").write_text(str(BUFFER_KB))
        (event / "filter").write_text(" || ".join(f"next_pid == {each}" for each in threads))
        (event / "enable").write_text("1")
        seen: dict[int, set[int]] = {thread: set() for thread in threads}
        yield seen
        (event / "enable").write_text("0")
        for thread, priority in SWITCH.findall((instance / "trace").read_text()):
            seen[int(thread)].add(int(priority))


@contextlib.contextmanager
def tracer() -> Iterator[Path]:
    """Make a tracer of one's own, which is gone after the block."""
    with tempfile.TemporaryDirectory(prefix="forkd-tracer-") as name:
        folder = Path(name)
        with mounted("tracefs", folder):
            instance = folder / "instances" / folder.name
            instance.mkdir()
            try:
                yield instance
            finally:
                instance.rmdir()
