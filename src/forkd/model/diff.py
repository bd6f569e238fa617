"""How the files of two machines differ.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from forkd.model.limits import DIFF_CHANGES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping


class Change(StrEnum):
    """What became of a file on the way from one machine to the other."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells whether a file is as it was.

    Attributes:
        kind: One letter: f, d, l, …
        size_bytes: Length of its contents.
        stamps: When its contents and its inode were last changed, in the guest's words.  Whoever
            sets the first back cannot set back the second.
        access: Mode, owner and group, in the guest's words.
        target: Where a symbolic link leads; empty for anything else.
    """

    kind: str
    size_bytes: int
    stamps: tuple[str, str]
    access: str
    target: str

    def differs(self, other: FileState) -> bool:
        """Whether a file that was this became `other`.

        A folder's times and length are those of its entries, which speak for themselves.
        """
        if self.kind == other.kind == "d":
            return self.access != other.access
        return self != other


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


def compare(
    before: Mapping[str, FileState],
    after: Mapping[str, FileState],
    pages_apart: int | None = None,
) -> Difference:
    """Return how the files `after` differ from those `before`."""
    found = []
    for path in sorted(before.keys() | after.keys()):
        was, now = before.get(path), after.get(path)
        if was is None and now is not None:
            found.append(FileChange(path, Change.ADDED, now.kind, now.size_bytes))
        elif was is not None and now is None:
            found.append(FileChange(path, Change.REMOVED, was.kind, was.size_bytes))
        elif was is not None and now is not None and was.differs(now):
            found.append(FileChange(path, Change.CHANGED, now.kind, now.size_bytes))
    kept = tuple(found[:DIFF_CHANGES_MAX])
    return Difference(kept, len(found) - len(kept), pages_apart)
