"""Output of programs that is kept in memory until it is answered, within one budget for all.

A program may write without end, and any number of programs may.  What is beyond the limit of one
output, or finds the budget or its tenant's share of it used up, is dropped and counts as truncated.
"""

from __future__ import annotations

import codecs
import contextlib
from typing import TYPE_CHECKING

from forkd.model.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.model.caller import Caller

PIECE_BYTES = 64 * 1024


class OutputBudget:
    """How many bytes of output are kept at once; tenants share them."""

    def __init__(self, bytes_max: int) -> None:
        self._shares = Shares(bytes_max)

    @property
    def free_bytes(self) -> int:
        """How many more may be kept, by all tenants together."""
        return self._shares.most - self._shares.used

    def take(self, caller: Caller, wanted: int) -> int:
        """Take as many of so many bytes as the caller may have; return how many."""
        taken = min(wanted, self._shares.room(caller.tenant, whole=caller.is_admin))
        self._shares.take(caller.tenant, taken, whole=caller.is_admin)
        return taken

    def give_back(self, caller: Caller, count: int) -> None:
        """Give back bytes that were taken."""
        if count:
            self._shares.give_back(caller.tenant, count)

    @contextlib.contextmanager
    def keep(self, caller: Caller, bytes_max: int) -> Iterator[Kept]:
        """Keep up to `bytes_max` of one output of a caller's for the block."""
        kept = Kept(bytes_max, (self, caller))
        try:
            yield kept
        finally:
            kept.release()


class Kept:
    """The beginning of an output, as far as there was room for it.

    Args:
        bytes_max: Its own limit.
        budget: What it is taken from, and for whom; None: from no budget.

    Attributes:
        truncated: Whether something was dropped.
    """

    def __init__(self, bytes_max: int, budget: tuple[OutputBudget, Caller] | None = None) -> None:
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
            budget, caller = self._budget
            wanted = min(room, len(data))
            taken = budget.take(caller, wanted)
            room = room if taken == wanted else taken
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
            budget, caller = self._budget
            budget.give_back(caller, len(self._data))
        self._data = bytearray()
