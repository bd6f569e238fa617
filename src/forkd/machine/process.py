"""Name a process so that its number being reused cannot fool us."""

from __future__ import annotations

import os
import select
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

START_TICKS_FIELD = 19
"""Place of `starttime` in /proc/PID/stat after the command's name."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process by its number and the time it started, in the kernel's ticks."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the identity of the live process `pid`, or None."""
        try:
            fields = (
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            )
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[START_TICKS_FIELD]))

    def is_alive(self) -> bool:
        """Whether that very process still runs."""
        return ProcessId.of(self.pid) == self

    def end(self, signals: tuple[signal.Signals | None, ...], *, grace_s: float) -> bool:
        """Send each of `signals` in turn until the process ends; return whether it did.

        None sends nothing and only waits.  Each is given `grace_s`.
        """
        with _pidfd(self) as pidfd:
            if pidfd is None:
                return True
            for number in signals:
                if number is not None:
                    try:
                        signal.pidfd_send_signal(pidfd, number)
                    except ProcessLookupError:
                        return True
                if select.select([pidfd], [], [], grace_s)[0]:
                    return True
        return False


@contextmanager
def _pidfd(process: ProcessId) -> Iterator[int | None]:
    """Hold the process, so that between the check and the signal it cannot change."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield pidfd if process.is_alive() else None
    finally:
        os.close(pidfd)
