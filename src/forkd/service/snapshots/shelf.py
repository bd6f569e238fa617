"""Snapshots by tag, how they depend on each other, and what is being done to them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkd.errors import Conflict
from forkd.limits import CHAIN_DEPTH_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forkd.model.ids import Tag
    from forkd.model.snapshot import Snapshot


@dataclass(slots=True)
class Write:
    """A snapshot that is being written; `ended` is set when it is not any more."""

    snapshot: Snapshot
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Shelf:
    """The snapshots of one host, whosever they are; `forkd.service.snapshots.catalog` fills it.

    Attributes:
        known: Those in the store.
        failed: Those that could not be written, of which there is only a record.
        writing: Those that are being written.
    """

    def __init__(self) -> None:
        self.known: dict[Tag, Snapshot] = {}
        self.failed: dict[Tag, Snapshot] = {}
        self.writing: dict[Tag, Write] = {}
        self._locked: dict[Tag, str] = {}

    def tags(self) -> list[Tag]:
        """Return the tags of all of them, in order."""
        return sorted(self.known.keys() | self.failed.keys() | self.writing.keys())

    def find(self, tag: Tag) -> Snapshot | None:
        """Return one snapshot, whosever it is, as it is stored; None if there is none."""
        write = self.writing.get(tag)
        if write is not None:
            return write.snapshot
        return self.known.get(tag) or self.failed.get(tag)

    def ancestors(self, snapshot: Snapshot) -> list[Snapshot]:
        """Return the snapshots under one, its parent first, as far as they are there."""
        found: list[Snapshot] = []
        parent = snapshot.parent
        while parent is not None and len(found) <= CHAIN_DEPTH_MAX:
            above = self.known.get(parent)
            if above is None:
                break
            found.append(above)
            parent = above.parent
        return found

    def image_keys(self) -> set[str]:
        """Return the images that snapshots in the store need; empty where one is damaged."""
        return {snapshot.image_key for snapshot in self.known.values()}

    def dependents(self, tag: Tag) -> tuple[Tag, ...]:
        """Return the snapshots whose parent is `tag`, those being written included."""
        every = [*self.known.values(), *(write.snapshot for write in self.writing.values())]
        return tuple(sorted(each.tag for each in every if each.parent == tag))

    def descendants(self, tag: Tag) -> tuple[Tag, ...]:
        """Return the snapshots that depend on `tag`, each after all that depend on it."""
        found: list[Tag] = []
        for child in self.dependents(tag):
            found += [*self.descendants(child), child]
        return tuple(found)

    def is_locked(self, tag: Tag) -> bool:
        """Whether a snapshot is being compacted, or removed."""
        return tag in self._locked

    def check_unlocked(self, tag: Tag) -> None:
        """Return if a snapshot is not locked.

        Raises:
            Conflict: It is: being compacted, or removed.
        """
        if tag in self._locked:
            raise Conflict(f"snapshot {tag} is {self._locked[tag]}", tag=tag)

    @contextlib.contextmanager
    def locked(self, tags: Iterable[Tag], doing: str) -> Iterator[None]:
        """Let nobody use `tags` within the block.

        Args:
            tags: Snapshots.
            doing: What is done to them, for whoever is refused: "being removed".
        """
        locked = tuple(tags)
        self._locked.update(dict.fromkeys(locked, doing))
        try:
            yield
        finally:
            for tag in locked:
                self._locked.pop(tag, None)
