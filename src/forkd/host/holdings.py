"""What processes hold of the host: memory, and files without names.

The kernel walks a whole process for its memory, some milliseconds for each, so there is a limit
to how long one reading takes.  What it does not come to keeps the figures of an earlier one, and
is read first the next time.
"""

from __future__ import annotations

import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.host import proc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PROC = Path("/proc")
_BLOCK_BYTES = 512

File = tuple[int, int]
"""A file: its device and its number there."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one process holds.

    Attributes:
        private_bytes: Memory that nobody shares with it.
        proportional_bytes: Its memory, where n processes share a page as an nth of it each.
        nameless: What its files without names take on their disk.
    """

    private_bytes: int
    proportional_bytes: int
    nameless: Mapping[File, int] = field(default_factory=dict)


class Holdings:
    """Reads what processes hold, a bounded time at once.

    Args:
        folder: On whose file system those files without names are that count.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[int, Holding] = {}

    def read(self, pids: Iterable[int], *, within_s: float) -> dict[int, Holding]:
        """Return what each process holds that lives; blocks, `within_s` at most.

        One that there was never time for counts with its anonymous memory, which is an upper
        bound.
        """
        asked = set(pids)
        device = self._folder.stat().st_dev
        deadline_s = time.monotonic() + within_s
        self._known = {pid: known for pid, known in self._known.items() if pid in asked}
        for pid in [*(asked - self._known.keys()), *self._known]:  # the newest figures are last
            if time.monotonic() >= deadline_s:
                break
            self._known.pop(pid, None)
            if (found := _holding(pid, device)) is not None:
                self._known[pid] = found
        missing = {pid: proc.anonymous_bytes(pid) for pid in asked - self._known.keys()}
        return self._known | {pid: Holding(most, most) for pid, most in missing.items() if most}


def _holding(pid: int, device: int) -> Holding | None:
    shares = proc.shares(pid)
    return None if shares is None else Holding(*shares, _nameless(pid, device))


def _nameless(pid: int, device: int) -> dict[File, int]:
    """Return what the files of a process that have no name take on a device."""
    found: dict[File, int] = {}
    try:
        for descriptor in (_PROC / str(pid) / "fd").iterdir():
            status = descriptor.stat()
            if status.st_dev == device and status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                found[device, status.st_ino] = status.st_blocks * _BLOCK_BYTES
    except OSError:
        pass  # it, or the file, has gone meanwhile
    return found
