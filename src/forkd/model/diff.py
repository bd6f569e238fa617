"""How two machines differ."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Change(StrEnum):
    """What became of a file on the way from one machine to the other."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file that differs; size and kind are of the machine that has it, the second before."""

    path: str
    change: Change
    kind: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Difference:
    """How two machines differ.

    Attributes:
        changes: By path; at most `DIFF_CHANGES_MAX`.
        more: How many others there are.
        pages_apart: How many pages of memory they do not share; None if they have no memory
            that could be compared.
    """

    changes: tuple[FileChange, ...]
    more: int = 0
    pages_apart: int | None = None
