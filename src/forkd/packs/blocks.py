"""Files as records: each distinct block of 4096 bytes once, blocks of zeros not at all.

    kind (u8)  first (u64)  second (u64)                       little-endian, then its data
    1 BYTES    length       0             `length` bytes, which are no blocks
    2 BLOCKS   count        0             `count` blocks; each takes the next number
    3 COPY     count        number        as the blocks from `number` on were
    4 ZEROS    count        0             blocks of zeros

Records follow each other without regard to chunks; none reaches over the end of its file.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from blake3 import blake3

from forkd.packs.limits import DEDUP_BLOCKS_MAX
from forkd.packs.manifest import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

RECORD = struct.Struct("<BQQ")
ZERO_BLOCK = bytes(BLOCK_BYTES)
BLOCKS_AT_ONCE = 256
"""Most blocks in one BLOCKS record that we write: what is held before it is."""

_KEY_BYTES = 16


class Kind(IntEnum):
    """What a record is."""

    BYTES = 1
    BLOCKS = 2
    COPY = 3
    ZEROS = 4


class Encoder:
    """Turns the pieces of files into records, which it hands to `emit`."""

    def __init__(self, emit: Callable[[bytes], object]) -> None:
        self._emit = emit
        self._known: dict[bytes, int] = {}
        self._next = 0
        self._kind: Kind | None = None
        self._count = 0
        self._first = 0
        self._fresh: list[bytes] = []

    def raw(self, data: bytes) -> None:
        """Add bytes that are no blocks: a header, a table, the end of a file."""
        if data:
            self.flush()
            self._emit(RECORD.pack(Kind.BYTES, len(data), 0))
            self._emit(data)

    def blocks(self, data: bytes) -> None:
        """Add whole blocks."""
        for start in range(0, len(data), BLOCK_BYTES):
            self._block(data[start : start + BLOCK_BYTES])

    def flush(self) -> None:
        """Hand over what is held; at the end of a file."""
        if self._kind is None:
            return
        second = self._first if self._kind is Kind.COPY else 0
        self._emit(RECORD.pack(self._kind, self._count, second))
        for block in self._fresh:
            self._emit(block)
        self._kind, self._count = None, 0
        self._fresh.clear()

    def _block(self, block: bytes) -> None:
        if block == ZERO_BLOCK:
            self._add(Kind.ZEROS, 0)
            return
        key = blake3(block).digest(length=_KEY_BYTES)
        number = self._known.get(key)
        if number is not None:
            self._add(Kind.COPY, number)
            return
        if len(self._known) < DEDUP_BLOCKS_MAX:
            self._known[key] = self._next
        self._add(Kind.BLOCKS, self._next)
        self._fresh.append(block)
        self._next += 1

    def _add(self, kind: Kind, number: int) -> None:
        goes_on = kind is self._kind and (
            kind is not Kind.COPY or number == self._first + self._count
        )
        if not goes_on or len(self._fresh) >= BLOCKS_AT_ONCE:
            self.flush()
            self._kind, self._first = kind, number
        self._count += 1


@dataclass
class Places:
    """Where each numbered block was written, in runs: `(file, offset)` by first number.

    Attributes:
        count: How many blocks have a number.
    """

    count: int = 0
    _firsts: list[int] = field(default_factory=list)
    _at: list[tuple[int, int]] = field(default_factory=list)

    def add(self, file: int, offset: int, count: int) -> None:
        """Give numbers to `count` blocks that begin at `offset` of a file."""
        if self._firsts:
            last_file, last_offset = self._at[-1]
            run_bytes = (self.count - self._firsts[-1]) * BLOCK_BYTES
            if (file, offset) == (last_file, last_offset + run_bytes):
                self.count += count
                return
        self._firsts.append(self.count)
        self._at.append((file, offset))
        self.count += count

    def find(self, number: int, count: int) -> tuple[int, int, int]:
        """Return file and offset of block `number`, and how many of `count` follow it there."""
        run = bisect_right(self._firsts, number) - 1
        end = self._firsts[run + 1] if run + 1 < len(self._firsts) else self.count
        file, offset = self._at[run]
        inside = number - self._firsts[run]
        return file, offset + inside * BLOCK_BYTES, min(count, end - number)
