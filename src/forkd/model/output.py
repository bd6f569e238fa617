"""Output of programs that is kept in memory until it is answered, within one budget for all.

A program may write without end, and any number of programs may.  What is beyond the limit of one
output, or finds the budget used up by others, is dropped and counts as truncated.
"""

from __future__ import annotations

import codecs
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 64 * 1024


class OutputBudget:
    """How many bytes of output are kept at once.

    Attributes:
        free_bytes: How many more may be.
    """

    def __init__(self, bytes_max: int) -> None:
        self.free_bytes = bytes_max

    @contextlib.contextmanager
    def keep(self, bytes_max: int) -> Iterator[Kept]:
        """Keep up to `bytes_max` of one output for the block."""
        kept = Kept(bytes_max, self)
        try:
            yield kept
        finally:
            kept.release()


class Kept:
    """The beginning of an output, as far as there was room for it.

    Args:
        bytes_max: Its own limit.
        budget: What it is taken from; None: from no budget.

    Attributes:
        truncated: Whether something was dropped.
    """

    def __init__(self, bytes_max: int, budget: OutputBudget | None = None) -> None:
        self._bytes_max = bytes_max
        self._budget = budget
        self._data = bytearray()
        self.truncated = False

    def __len__(self) -> int:
        return len(self._data)

    def add(self, data: bytes) -> None:
        """Keep what there is room for; once something was dropped, nothing more."""
        room = 0 if self.truncated else self._bytes_max - len(self._data)
        if self._budget is not None:
            room = min(room, self._budget.free_bytes)
            self._budget.free_bytes -= min(room, len(data))
        self._data += data[:room]
        self.truncated = self.truncated or len(data) > room

    def text(self) -> str:
        """Return what was kept, with U+FFFD for what is not UTF-8."""
        return "".join(self.pieces())

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces, so that it is never in memory a second time."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for start in range(0, len(self._data), PIECE_BYTES):
            end = start + PIECE_BYTES
            yield decoder.decode(self._data[start:end], final=end >= len(self._data))

    def release(self) -> None:
        """Forget everything; idempotent."""
        if self._budget is not None:
            self._budget.free_bytes += len(self._data)
        self._data = bytearray()
