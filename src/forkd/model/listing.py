"""How messages list names: a few, and how many more there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMED_MAX = 5
"""How many names a message has before it only counts the others."""


def some(names: Iterable[str], most: int = NAMED_MAX) -> str:
    """Return the first of the names and how many more there are; nothing if there are none."""
    every = tuple(names)
    more = len(every) - most
    return ", ".join(every[:most]) + (f" and {more} more" if more > 0 else "")
