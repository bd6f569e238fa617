"""So many of one kind of work at once: one more is refused, and told when to try again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Generator


@dataclass(slots=True)
class Places:
    """The places that one kind of work has on this host, whoever asks for it.

    Attributes:
        what: What is done there, in the plural.
        most: How many places there are.
        retry_after_s: When one is likely to be free again.
        used: How many are taken.
    """

    what: str
    most: int
    retry_after_s: int
    used: int = 0

    @contextlib.contextmanager
    def take(self) -> Generator[None, None, None]:
        """Have a place for the block.

        Raises:
            CapacityError: All are taken; `context` has `asked`, `limit`, `used` and
                `retry_after_s`.
        """
        if self.used >= self.most:
            raise full(self.what, self.most, self.used, self.retry_after_s)
        self.used += 1
        try:
            yield
        finally:
            self.used -= 1


def full(what: str, limit: int, used: int, retry_after_s: int) -> CapacityError:
    """Return the error of who asks for one more of something of which there are too many."""
    return CapacityError(
        f"one more of {what} was asked for; this host has at most {limit} at once, and {used} are "
        f"in use: try again in {retry_after_s} s",
        asked=1,
        limit=limit,
        used=used,
        retry_after_s=retry_after_s,
    )
