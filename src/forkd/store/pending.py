"""Which snapshots are being written, and which could not be, so that a restart knows.

    <state>/writing/<tag>.json

A record is made before anything of its snapshot is, and removed once the snapshot has its
name.  What has a record and no folder failed: the record says why, or its writer was killed.
Every method may block.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from forkd.errors import ForkdError
from forkd.host import files
from forkd.model.ids import parse_tag

if TYPE_CHECKING:
    from pathlib import Path

RECORD_BYTES_MAX = 64 * 1024
"""Longest record that is read; ours have some hundred bytes."""

_SUFFIX = ".json"

log = logging.getLogger(__name__)


class Record(BaseModel):
    """A snapshot that is not there yet.

    Attributes:
        tag: Its name.
        created_at: When it was asked for, UTC.
        parent: What it would be a difference against; None for a base.
        source: The sandbox that it is taken of; None if it is made of snapshots alone.
        error: Why it failed; None while it is being written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tag: str
    created_at: datetime
    parent: str | None = None
    source: str | None = None
    error: str | None = None


class PendingStore:
    """The records below one state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "writing"

    def prepare(self) -> None:
        """Make the folder."""
        files.make_folder(self._folder, parents=True, exist_ok=True)

    def put(self, record: Record) -> None:
        """Write a record, or replace it.

        Raises:
            CapacityError: There is no room for it.
        """
        path = self._folder / f"{record.tag}{_SUFFIX}"
        files.write_atomic(path, record.model_dump_json().encode())

    def remove(self, tag: str) -> None:
        """Remove a record; one that is gone is fine."""
        if files.remove_file(self._folder / f"{tag}{_SUFFIX}"):
            files.sync_folder(self._folder)

    def records(self) -> tuple[Record, ...]:
        """Return every record, by tag; what is none is removed, a later forkd's left alone."""
        found = (self._read(path) for path in files.entries(self._folder))
        return tuple(record for record in found if record is not None)

    def _read(self, path: Path) -> Record | None:
        try:
            record = Record.model_validate_json(files.read(path, RECORD_BYTES_MAX) or b"")
            if path.name == f"{parse_tag(record.tag)}{_SUFFIX}":
                return record
        except (ValidationError, ForkdError) as error:
            if isinstance(error, ValidationError) and _is_later(error):
                log.warning("record of a later forkd left alone", extra={"path": str(path)})
                return None
            log.warning("record damaged", extra={"path": str(path), "error": str(error)})
        files.remove_tree(path)
        return None


def _is_later(error: ValidationError) -> bool:
    """Whether a record has all that ours have, and more: a later forkd has written it."""
    return all(each["type"] == "extra_forbidden" for each in error.errors(include_url=False))
