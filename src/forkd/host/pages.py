"""Which pages of memory two processes do not share, as the kernel's page maps say."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

from forkd.host.faults import kernel_call

_PROC = Path("/proc")
_ENTRY_BYTES = 8
_PRESENT = 1 << 63
_SWAPPED = 1 << 62
_FILE = 1 << 61
_FRAME = (1 << 55) - 1

_READ_PAGES = 1 << 17
"""Pages compared at a time: half a GiB of them, in a MiB of entries."""


def apart(one: int, other: int, mapping: str) -> int | None:
    """Return how many pages of a mapping two processes have different copies of.

    A page that a process has not copied is the file's, and so the same for both.

    Args:
        one: A process.
        other: Another, which maps the same file in as many pieces.
        mapping: The name under which both have it, without a path.

    Returns:
        None if one has ended, or has no such mapping, or they do not have the same pieces.

    Raises:
        CapacityError: There are too many open files, or too little memory.
        HostError: The kernel does not say.
    """
    with kernel_call(f"compare the memory of processes {one} and {other}"):
        try:
            return _count_apart(one, other, mapping)
        except (FileNotFoundError, ProcessLookupError):
            return None


def _count_apart(one: int, other: int, mapping: str) -> int | None:
    pieces, others = _pieces(one, mapping), _pieces(other, mapping)
    if not pieces or [length for _, length in pieces] != [length for _, length in others]:
        return None
    with (
        (_PROC / f"{one}/pagemap").open("rb") as a,
        (_PROC / f"{other}/pagemap").open("rb") as b,
    ):
        return sum(
            _apart(_entries(a.fileno(), start + at, count), _entries(b.fileno(), twin + at, count))
            for (start, length), (twin, _) in zip(pieces, others, strict=True)
            for at in range(0, length, _READ_PAGES)
            for count in (min(_READ_PAGES, length - at),)
        )


def _apart(entries: array[int], others: array[int]) -> int:
    return sum(1 for a, b in zip(entries, others, strict=False) if a != b and _own(a) != _own(b))


def _own(entry: int) -> int:
    """Return which copy of its own a process has, or 0 if it has the file's."""
    if entry & _SWAPPED:
        return entry & _FRAME | _SWAPPED
    return entry & _FRAME if entry & _PRESENT and not entry & _FILE else 0


def _pieces(pid: int, mapping: str) -> list[tuple[int, int]]:
    """Return first page and number of pages of each piece of a mapping, by address."""
    size = os.sysconf("SC_PAGE_SIZE")
    found = []
    for line in (_PROC / f"{pid}/maps").read_text().splitlines():
        if f"/memfd:{mapping} " in f"{line} ":
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            found.append((start // size, (end - start) // size))
    return found


def _entries(descriptor: int, page: int, count: int) -> array[int]:
    raw = os.pread(descriptor, count * _ENTRY_BYTES, page * _ENTRY_BYTES)
    return array("Q", raw)
