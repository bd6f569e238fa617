"""What set-up has changed on a host, written before each change, so that it can be taken back.

An entry says what a part was like before the first change, and what it is like behind the last one.
It is on disk before the part is changed: a crash at any point leaves no change without its entry.
The record is one file in a folder of its own; with the last entry both go.  It is no part of the
daemon's state, which may be removed while the host stays set up.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from forkd.errors import Conflict, HostError
from forkd.host import files
from forkd.host.parts import Kind, Part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.host.parts import State

FOLDER = Path("var/lib/forkd-host")
FILE = "setup.json"

RECORD_BYTES_MAX = 4 * 1024 * 1024
"""The longest record that is read; entries of all parts have a tenth of that."""


class Entry(BaseModel):
    """One part that was changed.

    Attributes:
        kind: What it is.
        name: Which one.
        before: What it was like before set-up changed it.
        after: What set-up has made of it.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    name: str
    before: dict[str, str | int] | None
    after: dict[str, str | int] | None

    @property
    def part(self) -> Part:
        """The part."""
        return Part(self.kind, self.name)

    def as_members(self) -> dict[str, object]:
        """Return it as members of a JSON object."""
        return {"before": self.before, "after": self.after}


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: Literal[1]
    entries: list[Entry]


class Record:
    """The record of a host, which one process at a time has."""

    def __init__(self, folder: Path, entries: list[Entry]) -> None:
        self._folder = folder
        self._entries = entries

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What was changed, in that order."""
        return tuple(self._entries)

    def find(self, part: Part) -> Entry | None:
        """Return a part's entry; None if set-up has not changed it."""
        return next((each for each in self._entries if each.part == part), None)

    def note(self, part: Part, before: State, after: State) -> None:
        """Note a change that is about to be made.

        The state from before an earlier change is kept, unless somebody else has changed the part
        since: then theirs is what is to come back.
        """
        known = self.find(part)
        if known is None:
            self._entries.append(Entry(kind=part.kind, name=part.name, before=before, after=after))
        else:
            if known.after != before:
                known.before = before
            known.after = after
        self._save()

    def settle(self, part: Part, now: State) -> None:
        """Note what a change has made of a part; one that is as it was before has no entry."""
        known = self.find(part)
        if known is not None and known.before == now:
            self.drop(part)
        elif known is not None and known.after != now:
            known.after = now
            self._save()

    def drop(self, part: Part) -> None:
        """Forget a part."""
        self._entries = [each for each in self._entries if each.part != part]
        self._save()

    def _save(self) -> None:
        path = self._folder / FILE
        if not self._entries:
            files.remove_file(path)
            return
        stored = _Stored(version=1, entries=self._entries)
        files.write_atomic(path, stored.model_dump_json(indent=1).encode(), mode=0o600)


def load(root: Path) -> tuple[Entry, ...]:
    """Return the entries of the host below a root; none if it was never set up.

    Raises:
        HostError: The record cannot be read, or is none that this version can read.
    """
    path = root / FOLDER / FILE
    data = files.read(path, RECORD_BYTES_MAX + 1)
    if data is None:
        return ()
    if len(data) > RECORD_BYTES_MAX:
        raise HostError(f"{path} has more than {RECORD_BYTES_MAX} bytes, and is no record of ours")
    try:
        return tuple(_Stored.model_validate_json(data).entries)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its text"
        raise HostError(
            f"{path} is no record that this version of forkd reads ({where}: {first['msg']}); the "
            "version that wrote it can undo it, and without the file nothing is undone"
        ) from error


@contextlib.contextmanager
def held(root: Path) -> Iterator[Record]:
    """Give the record of the host below a root, which no other process has meanwhile.

    Its folder is made, and removed again if there is no entry behind the block.

    Raises:
        Conflict: Another process sets this host up, or undoes that.
        HostError: As for `load`; or the folder cannot be made.
    """
    folder = root / FOLDER
    files.make_folder(folder, parents=True, exist_ok=True)
    with files.try_lock_folder(folder) as is_ours:
        if not is_ours:
            raise Conflict("another `forkd host setup` or `undo` runs on this host")
        record = Record(folder, list(load(root)))
        try:
            yield record
        finally:
            if not record.entries:
                files.remove_tree(folder)
