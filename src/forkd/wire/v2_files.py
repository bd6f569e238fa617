"""Requests and answers of version 1 about files inside a sandbox.

The rules are those of `wire.v2`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, field_serializer, model_validator
from pydantic_core import PydanticCustomError

from forkd import limits
from forkd.wire.parts import Answer, Query, Request
from forkd.wire.text import MEMBER, Path, decoded, readable


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

    name: str = Field(description="U+FFFD stands for what is not UTF-8.")
    name_b64: str | None = Field(default=None, description="Its bytes, if it is not UTF-8.")
    kind: Literal["file", "directory", "symlink", "other"]
    size_bytes: int
    mode: int
    uid: int
    gid: int
    modified_at_ns: int
    target: str | None = None
    target_b64: str | None = Field(default=None, description="Its bytes, if it is not UTF-8.")

    @model_validator(mode="after")
    def _with_bytes(self) -> Self:
        """Have names stand for their bytes, as in `os.fsdecode`."""
        for name, digits in (("name", self.name_b64), ("target", self.target_b64)):
            if digits is not None:
                self.__dict__[name] = decoded(digits)
        return self

    @field_serializer("name", "target")
    def _readable(self, text: str | None) -> str | None:
        return None if text is None else readable(text)


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
    """Which file: `path`, or `path_b64` if it is not UTF-8."""

    path: Path = Field(default="", validate_default=False)
    path_b64: str | None = Field(default=None, description="Its bytes in base64.")

    @model_validator(mode="before")
    @classmethod
    def _one_path(cls, members: object) -> object:
        if not isinstance(members, dict):
            return members
        if (members.get("path") is None) == (members.get("path_b64") is None):
            raise PydanticCustomError("path", "exactly one of path and path_b64 must be given")
        if (digits := members.get("path_b64")) is not None:
            return {**members, "path": {MEMBER: digits}}
        return members


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
