"""Threads of a machine come before all others on their processors, while its guest is paused.

A guest that is paused for a branch waits for threads that the kernel's scheduler has no reason to
prefer (docs/adr/0020-a-guest-that-stands-still-comes-first.md).  The machine may not prefer them
itself: whoever takes its process over would do so for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.limits import VCPUS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

VCPU_PRIORITY = 1
"""The lowest that there is."""

STOPPER_PRIORITY = VCPU_PRIORITY + 1
"""Of the thread that stops vCPUs and lets them go: above theirs, which have no end of work."""

URGENT_S = 1.0
"""How long threads are urgent at most, however long the machine takes to answer."""

_URGENT = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
"""What a process that is forked meanwhile does not inherit."""

_CALM = os.SCHED_OTHER | os.SCHED_RESET_ON_FORK
_USUAL = (os.SCHED_OTHER, _CALM)


@contextlib.contextmanager
def urgent(pid: int) -> Iterator[None]:
    """Have the first thread of a process, and its vCPUs, come first within the block.

    A thread may go back by itself before, as a vCPU does when the guest goes on.  Threads stay as
    they are where the kernel does not let us, as without root, or where somebody has given them a
    policy.
    """
    raised = [each for each in _threads(pid) if _raise(each, pid)]
    timer = asyncio.get_running_loop().call_later(URGENT_S, _calm, raised)
    try:
        yield
    finally:
        timer.cancel()
        _calm(raised)


def _threads(pid: int) -> list[int]:
    """Return the ids of the threads that a machine has, and of no more."""
    try:
        found = sorted(int(each.name) for each in Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # it is gone
        return []
    return found[: 1 + VCPUS_MAX]


def _raise(thread: int, pid: int) -> bool:
    priority = STOPPER_PRIORITY if thread == pid else VCPU_PRIORITY
    try:
        if os.sched_getscheduler(thread) not in _USUAL:
            return False
        os.sched_setscheduler(thread, _URGENT, os.sched_param(priority))
    except OSError:  # it is gone, or we may not
        return False
    if os.access(f"/proc/{pid}/task/{thread}", os.F_OK):
        return True
    _calm([thread])  # its number is another's by now
    return False


def _calm(threads: list[int]) -> None:
    for each in threads:
        with contextlib.suppress(OSError):  # it is gone
            if os.sched_getscheduler(each) == _URGENT:
                os.sched_setscheduler(each, _CALM, os.sched_param(0))
