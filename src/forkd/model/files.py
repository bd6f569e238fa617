"""Files inside a guest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EntryKind(StrEnum):
    """What a directory entry is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """What became of an archive.

    Attributes:
        entries: How many members were made.
        bytes: In files among them.
        skipped: Path and reason of each member that was left out.
        more_skipped: How many more were.
    """

    entries: int
    bytes: int
    skipped: tuple[tuple[str, str], ...] = ()
    more_skipped: int = 0


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry of a directory in a guest.

    Attributes:
        name: Its last component.
        kind: What it is; symbolic links are not followed.
        size_bytes: Its length.
        mode: Permission bits.
        uid: Its owner.
        gid: Its group.
        modified_at_ns: When it was last written, nanoseconds since the epoch, by the guest's clock.
        target: Where a symbolic link points; None for anything else.
    """

    name: str
    kind: EntryKind
    size_bytes: int
    mode: int
    uid: int
    gid: int
    modified_at_ns: int
    target: str | None = None
