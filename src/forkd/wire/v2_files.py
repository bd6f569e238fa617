"""Requests and answers of version 1 about files inside a sandbox.

The rules are those of `wire.v2`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from forkd import limits
from forkd.wire.v2 import Answer, Path, Query, Request


def _mode(value: object) -> object:
    """Return permissions as a number: text that begins with 0 is octal."""
    if not isinstance(value, str) or not value.startswith("0") or value == "0":
        return value
    if _OCTAL.fullmatch(value) is None:
        raise ValueError("must be octal, such as 0644")
    return int(value, 8)


_OCTAL = re.compile(r"0[0-7]{1,4}")

Mode = Annotated[
    Annotated[int, Field(ge=0, le=limits.FILE_MODE_MAX)] | None,
    BeforeValidator(_mode),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": "^0[0-7]{1,4}$"},
                {"type": "integer", "minimum": 0, "maximum": limits.FILE_MODE_MAX},
                {"type": "null"},
            ],
            "description": "Permissions: octal as text, such as `0644`, or a decimal number.",
        }
    ),
]


Owner = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=limits.EXEC_USER_CHARS_MAX,
        description="Who owns what is made new: a name or `uid[:gid]`; the image's user if absent.",
    ),
]


class FileEntry(Answer):
    """One file, folder or link in a guest."""

    name: str
    kind: Literal["file", "directory", "symlink", "other"]
    size_bytes: int
    mode: int
    uid: int
    gid: int
    modified_at_ns: int
    target: str | None = None


class FileList(Answer):
    """What is in a folder, by name."""

    entries: list[FileEntry]


class FileWritten(Answer):
    """A file was written whole."""

    bytes: int


class SkippedEntry(Answer):
    """What was left out of a copy."""

    path: str
    reason: str


class ArchiveWritten(Answer):
    """What became of an archive."""

    entries: int
    bytes: int
    skipped: list[SkippedEntry]
    more_skipped: int = Field(default=0, description="How many more were left out.")


class FilePath(Query):
    """Which file."""

    path: Path


class FileRead(FilePath):
    """Which part of which file."""

    offset: int = Field(default=0, ge=0)
    length: int | None = Field(default=None, ge=0)


class FileWrite(FilePath):
    """Where a file goes; its contents are the request's body."""

    mode: Mode = None
    make_parents: bool = False
    user: Owner = None


class ArchiveWrite(FilePath):
    """Where an archive's members go; it is the request's body."""

    user: Owner = None
    keep_owner: bool = Field(default=False, description="Owners are those of the archive.")


class FileRemove(FilePath):
    """What to remove."""

    recursive: bool = False


class MakeDir(Request):
    """Make a folder."""

    path: Path
    parents: bool = False
    mode: Mode = None
    user: Owner = None


class Move(Request):
    """Rename within one guest."""

    source: Path
    target: Path
