"""What guests and VMM processes hold: memory, descriptors, threads, mappings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.host import proc

if TYPE_CHECKING:
    from collections.abc import Iterable

TAKE_BACK = "umount /run/forkd/unused && echo 0 >/proc/sys/vm/nr_hugepages"
"""A command by which a guest breaks its memory limit: only the host keeps the limit then."""


def private_bytes(pids: Iterable[int]) -> int:
    """Return the bytes of anonymous memory that processes hold together, each page once."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        (line,) = (each for each in lines if each.startswith("Pss_Anon:"))
        total += int(line.split()[1]) * 1024
    return total


def image_bytes(pids: Iterable[int]) -> dict[int, int]:
    """Return the files in memory that processes map, by inode, and what each takes."""
    found = {}
    for pid in pids:
        for mapped in Path(f"/proc/{pid}/map_files").iterdir():
            if str(mapped.readlink()).startswith("/memfd:"):
                status = mapped.stat()
                found[status.st_ino] = status.st_blocks * 512
    return found


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds.

    Attributes:
        private_bytes: Memory that nobody shares with it.
        descriptors: Open files.
        threads: Its threads.
        mappings: Ranges of its address space.
    """

    private_bytes: int
    descriptors: int
    threads: int
    mappings: int

    @classmethod
    def by(cls, pid: int) -> Held:
        """Return what a process holds now."""
        folder = Path(f"/proc/{pid}")
        return cls(
            private_bytes=proc.private_bytes(pid) or 0,
            descriptors=len(list((folder / "fd").iterdir())),
            threads=len(list((folder / "task").iterdir())),
            mappings=len((folder / "maps").read_text().splitlines()),
        )

    def beyond(self, other: Held) -> Held:
        """Return how much more it is than another."""
        return Held(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))
