"""The VMM processes of a daemon: those that live in its run folder."""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING

from forkd.engine.process import CONFIG_OPTION
from forkd.host import proc
from forkd.service import seeds

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ENDING_S = 10.0
"""How long what ends by itself may take, on a busy host."""


def of(run_dir: Path) -> set[int]:
    """Return machines, zygotes, and whatever else is there.

    A retired seed belongs to the machines that go back to it, and is here only when there is
    none of these left.  It ends by itself then, so whoever counts may have to wait.
    """
    pids = {pid for pid in proc.processes() if proc.has_option_below(pid, CONFIG_OPTION, run_dir)}
    return pids - seeds.retired_for(pids)


def surviving(pids: Iterable[int], within_s: float = ENDING_S) -> set[int]:
    """Return those of `pids` that have not ended after a time; blocks until then, at most."""
    deadline_s = time.monotonic() + within_s
    return {pid for pid in pids if not _ends(pid, deadline_s)}


def _ends(pid: int, deadline_s: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(pidfd, closefd=True):  # noqa: PTH123 - a descriptor has no path
        left_s = max(0.0, deadline_s - time.monotonic())
        return bool(select.select([pidfd], [], [], left_s)[0])


def below(pid: int) -> list[int]:
    """Return the processes that one has started, and those that they have."""
    return [each for child in proc.children(pid) for each in (child, *below(child))]


def command(pid: int) -> bytes:
    """Return what a process was started with; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - no Path for a pid
            return file.read()
    except OSError:
        return b""
