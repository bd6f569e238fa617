"""Which snapshots there are, and which are on their way.

What is on disk is what there is; this is its index, made at the start and kept since.
Whoever wants to write a snapshot claims its tag first, which is where everything that can
be refused is refused, and settles the claim when it has ended, whichever way.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.errors import CapacityError, ChainError, Conflict, NotFound, StoreError
from forkd.limits import CHAIN_DEPTH_MAX, SNAPSHOTS_MAX, WRITING_WAIT_S
from forkd.model.ids import SandboxId, Tag, parse_tag
from forkd.model.snapshot import Snapshot, SnapshotStatus
from forkd.store.snapshots import check_link

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from forkd.store.manifest import Manifest
    from forkd.store.pending import PendingStore, Record
    from forkd.store.snapshots import SnapshotStore

NAMED_MAX = 5
"""How many names a message has before it only counts the others."""

KILLED = "the daemon ended while it was being written"
"""Why a snapshot failed whose writer left no other reason."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Write:
    """A snapshot that is being written; `ended` is set when it is not any more."""

    snapshot: Snapshot
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Registry:
    """The snapshots of one host: those in the store, those that failed, those being written.

    Args:
        store: Where they are.
        pending: Where it is remembered that they are being written.
        alive: Returns the sandboxes alive that go back to a snapshot.
    """

    def __init__(
        self,
        store: SnapshotStore,
        pending: PendingStore,
        alive: Callable[[Tag], tuple[SandboxId, ...]],
    ) -> None:
        self._store = store
        self._pending = pending
        self._alive = alive
        self._known: dict[Tag, Snapshot] = {}
        self._failed: dict[Tag, Snapshot] = {}
        self._writing: dict[Tag, _Write] = {}
        self._held: dict[Tag, str] = {}

    # Looking

    def list_all(self) -> tuple[Snapshot, ...]:
        """Return every snapshot, by tag, those being written included."""
        tags = self._known.keys() | self._failed.keys() | self._writing.keys()
        return tuple(self.get(tag) for tag in sorted(tags))

    def get(self, tag: Tag) -> Snapshot:
        """Return one snapshot.

        Raises:
            NotFound: There is none of that tag.
        """
        found = self._find(tag)
        if found is None:
            raise NotFound(f"no snapshot {tag!r}", tag=tag)
        under = self._ancestors(found)
        return replace(
            found,
            depth=len(under),
            chain_bytes=found.stored_bytes + sum(each.stored_bytes for each in under),
            sandboxes=len(self._alive(tag)),
        )

    def get_ready(self, tag: Tag) -> Snapshot:
        """Return one snapshot that can be forked.

        Raises:
            NotFound: There is none of that tag.
            Conflict: It is being written.
            StoreError: It is damaged, or could not be written.
        """
        snapshot = self.get(tag)
        if snapshot.status is SnapshotStatus.WRITING:
            raise Conflict(f"snapshot {tag} is still being written", tag=tag)
        if snapshot.status is SnapshotStatus.FAILED:
            raise StoreError(f"snapshot {tag} cannot be used: {snapshot.error}", tag=tag)
        self.check_free(tag)
        return snapshot

    def check_free(self, tag: Tag) -> None:
        """Return if nobody holds a snapshot.

        Raises:
            Conflict: Somebody does, to compact or to remove it.
        """
        if tag in self._held:
            raise Conflict(f"snapshot {tag} is {self._held[tag]}", tag=tag)

    async def wait_ready(self, tag: Tag) -> Snapshot:
        """Return one snapshot that can be forked, once it is written.

        Raises:
            NotFound: There is none of that tag, or its bake failed.
            Conflict: It is still being written after `WRITING_WAIT_S`.
            StoreError: It is damaged, or could not be written.
        """
        write = self._writing.get(tag)
        if write is not None:
            try:
                async with asyncio.timeout(WRITING_WAIT_S):
                    await write.ended.wait()
            except TimeoutError:
                log.warning("snapshot still being written", extra={"tag": tag})
        return self.get_ready(tag)

    def stored(self) -> tuple[Snapshot, ...]:
        """Return what is in the store, whole or damaged."""
        return tuple(self._known.values())

    def failed(self) -> tuple[Snapshot, ...]:
        """Return what could not be written, and of which there is only a record."""
        return tuple(self._failed.values())

    def writing(self) -> bool:
        """Whether anything is being written."""
        return bool(self._writing)

    def image_keys(self) -> set[str]:
        """Return the images that snapshots in the store stand on; empty where one is damaged."""
        return {snapshot.image_key for snapshot in self._known.values()}

    def dependents(self, tag: Tag) -> tuple[Tag, ...]:
        """Return the snapshots whose parent is `tag`, those being written included."""
        every = [*self._known.values(), *(write.snapshot for write in self._writing.values())]
        return tuple(sorted(each.tag for each in every if each.parent == tag))

    def descendants(self, tag: Tag) -> tuple[Tag, ...]:
        """Return the snapshots that stand on `tag`, each after all that stand on it."""
        found: list[Tag] = []
        for child in self.dependents(tag):
            found += [*self.descendants(child), child]
        return tuple(found)

    def users(self, tags: Iterable[Tag]) -> tuple[str, ...]:
        """Return the sandboxes alive that go back to any of `tags`."""
        return tuple(sandbox for tag in tags for sandbox in self._alive(tag))

    def chain(self, tag: Tag) -> tuple[Tag, ...]:
        """Return a snapshot's ancestors and itself, base first.

        Raises:
            NotFound: There is none of that tag.
        """
        under = self._ancestors(self.get(tag))
        return (*(each.tag for each in reversed(under)), tag)

    def _find(self, tag: Tag) -> Snapshot | None:
        write = self._writing.get(tag)
        if write is not None:
            return write.snapshot
        return self._known.get(tag) or self._failed.get(tag)

    def _ancestors(self, snapshot: Snapshot) -> list[Snapshot]:
        """Return the snapshots under one, its parent first, as far as they are there."""
        found: list[Snapshot] = []
        parent = snapshot.parent
        while parent is not None and len(found) <= CHAIN_DEPTH_MAX:
            above = self._known.get(parent)
            if above is None:
                break
            found.append(above)
            parent = above.parent
        return found

    # Changing

    def claim(self, tag: Tag, parent: Tag | None = None, source: SandboxId | None = None) -> None:
        """Take a tag for a snapshot that is written from now on; end it with `settle`.

        Raises:
            Conflict: The tag is taken, the parent is not ready, or has `CHAIN_DEPTH_MAX` under it.
            CapacityError: There are too many snapshots.
            NotFound: There is no such parent.
            StoreError: The parent is damaged.
        """
        made = self.check_claim(tag, parent)
        self._failed.pop(tag, None)
        self._writing[tag] = _Write(replace(made, source=source))

    def check_claim(self, tag: Tag, parent: Tag | None = None) -> Snapshot:
        """Return what `claim` would note; raises what it would raise."""
        if tag in self._writing:
            raise Conflict(f"snapshot {tag} is being written already", tag=tag)
        if tag in self._known:
            raise Conflict(f"snapshot {tag} exists", tag=tag)
        if len(self._known) + len(self._writing) >= SNAPSHOTS_MAX:
            raise CapacityError(f"there are {SNAPSHOTS_MAX} snapshots already")
        made = placeholder(tag, self._store)
        return made if parent is None else _over(self.get_ready(parent), made)

    def note_pause(self, tag: Tag, pause_ms: float) -> None:
        """Tell how long the source of a claimed snapshot stood still."""
        write = self._writing[tag]
        write.snapshot = replace(write.snapshot, pause_ms=pause_ms)

    def settle(
        self, tag: Tag, snapshot: Snapshot | None = None, *, error: str | None = None
    ) -> None:
        """End a claim: with a snapshot that is there, one that failed, or nothing at all."""
        write = self._writing.pop(tag)
        if snapshot is not None:
            self._known[tag] = snapshot
        elif error is not None:
            self._failed[tag] = replace(write.snapshot, status=SnapshotStatus.FAILED, error=error)
        write.ended.set()

    def add(self, snapshot: Snapshot) -> None:
        """Note what the store has from now on."""
        self._known[snapshot.tag] = snapshot
        self._failed.pop(snapshot.tag, None)

    def forget(self, tag: Tag) -> None:
        """Note that a snapshot is not there any more; those that stand on it have failed."""
        self._known.pop(tag, None)
        self._failed.pop(tag, None)
        for each in self.descendants(tag):
            broken = self._known[each]
            error = f"{each} stands on {tag}, which is missing"
            self._known[each] = replace(broken, status=SnapshotStatus.FAILED, error=error)

    def hold(self, tags: Iterable[Tag], doing: str) -> None:
        """Let nobody use `tags` until `release`; `doing` says why."""
        self._held.update(dict.fromkeys(tags, doing))

    def release(self, tags: Iterable[Tag]) -> None:
        """End a `hold`."""
        for tag in tags:
            self._held.pop(tag, None)

    # Reading the store

    async def load(self) -> None:
        """Read what is stored, and what an earlier daemon was writing."""
        self._known, self._failed = await asyncio.to_thread(self._load)

    def read(self, tag: Tag) -> Snapshot:
        """Return what is stored under `tag`; blocks.  A damaged snapshot is `failed`."""
        try:
            self._store.load_chain(tag)
            return from_manifest(self._store.load(tag), self._store)
        except StoreError as error:
            return self._damaged(tag, error)

    def _load(self) -> tuple[dict[Tag, Snapshot], dict[Tag, Snapshot]]:
        known: dict[Tag, Snapshot] = {}
        manifests: dict[Tag, Manifest] = {}
        for tag in self._store.tags():
            try:
                manifests[tag] = self._store.load(tag)
            except StoreError as error:
                known[tag] = self._damaged(tag, error)
        faults = {tag: str(snapshot.error) for tag, snapshot in known.items()}
        for tag, manifest in manifests.items():
            snapshot = from_manifest(manifest, self._store)
            fault = fault_of(tag, manifests, faults)
            if fault is not None:
                log.warning("snapshot damaged", extra={"tag": tag, "error": fault})
                snapshot = replace(snapshot, status=SnapshotStatus.FAILED, error=fault)
            known[tag] = snapshot
        return known, self._load_failed(known)

    def _load_failed(self, known: Mapping[Tag, Snapshot]) -> dict[Tag, Snapshot]:
        failed = {}
        for record in self._pending.records():
            tag = parse_tag(record.tag)
            if tag in known:
                self._pending.remove(tag)  # it was written, and its writer came no further
                continue
            ended = record.model_copy(update={"error": record.error or KILLED})
            self._pending.put(ended)
            failed[tag] = _from_record(ended, self._store)
        return failed

    def _damaged(self, tag: Tag, error: StoreError) -> Snapshot:
        log.warning("snapshot damaged", extra={"tag": tag, "error": str(error)})
        broken = placeholder(tag, self._store)
        return replace(broken, status=SnapshotStatus.FAILED, error=str(error))


def fault_of(tag: Tag, manifests: Mapping[Tag, Manifest], faults: dict[Tag, str]) -> str | None:
    """Say what is wrong with the chain under a snapshot; None if nothing is.  Pure.

    Args:
        tag: The snapshot; one of `manifests`.
        manifests: Those that are whole by themselves.
        faults: What is wrong with others; what is found is added.
    """
    path: list[Tag] = []
    while tag not in faults and tag in manifests and len(path) <= len(manifests):
        path.append(tag)
        parent = manifests[tag].parent
        if parent is None:
            break
        tag = parse_tag(parent)
    for child in reversed(path):
        fault = _fault(manifests[child], manifests, faults)
        if fault is not None:
            faults[child] = fault
    return faults.get(path[0]) if path else faults.get(tag)


def _fault(
    child: Manifest, manifests: Mapping[Tag, Manifest], faults: Mapping[Tag, str]
) -> str | None:
    """Say what is wrong between a link and its parent."""
    if child.parent is None:
        return None
    parent = parse_tag(child.parent)
    if parent in faults:
        return f"{child.tag} stands on {parent}, which cannot be used: {faults[parent]}"
    if parent not in manifests:
        return f"{child.tag} stands on {parent}, which is missing"
    try:
        check_link(child.tag, child, manifests[parent])
    except ChainError as error:
        return str(error)
    return None


def some(names: Iterable[str]) -> str:
    """Return a few names and how many more there are."""
    every = tuple(names)
    more = len(every) - NAMED_MAX
    return ", ".join(every[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def placeholder(tag: Tag, store: SnapshotStore) -> Snapshot:
    """Return a snapshot of which nothing is known but its name."""
    return Snapshot(
        tag=tag,
        status=SnapshotStatus.WRITING,
        created_at=datetime.now(UTC),
        recipe="",
        image_key="",
        vcpus=0,
        memory_bytes=0,
        disk_bytes=0,
        stored_bytes=0,
        runtime="none",
        parent=None,
        sandboxes=0,
        directory=store.folder(tag),
    )


def _over(parent: Snapshot, made: Snapshot) -> Snapshot:
    """Return a snapshot that is written over `parent`, which it is alike.

    Raises:
        Conflict: The chain is as long as chains may be.
    """
    if parent.depth >= CHAIN_DEPTH_MAX:
        raise Conflict(
            f"snapshot {parent.tag} has {parent.depth} snapshots under it, and a chain has at "
            f"most {CHAIN_DEPTH_MAX}: compact {parent.tag} first",
            tag=parent.tag,
        )
    return replace(
        made,
        parent=parent.tag,
        recipe=parent.recipe,
        image_key=parent.image_key,
        vcpus=parent.vcpus,
        memory_bytes=parent.memory_bytes,
        disk_bytes=parent.disk_bytes,
        runtime=parent.runtime,
    )


def _from_record(record: Record, store: SnapshotStore) -> Snapshot:
    return replace(
        placeholder(parse_tag(record.tag), store),
        status=SnapshotStatus.FAILED,
        created_at=record.created_at,
        parent=None if record.parent is None else parse_tag(record.parent, field="parent"),
        source=None if record.source is None else SandboxId(record.source),
        error=record.error,
    )


def from_manifest(manifest: Manifest, store: SnapshotStore) -> Snapshot:
    """Return a stored snapshot that is whole."""
    tag, link = parse_tag(manifest.tag), manifest.link
    return Snapshot(
        tag=tag,
        status=SnapshotStatus.READY,
        created_at=manifest.created_at,
        recipe=manifest.recipe,
        image_key=manifest.image_key,
        vcpus=manifest.vcpus,
        memory_bytes=manifest.memory_bytes,
        disk_bytes=manifest.disk_bytes,
        stored_bytes=manifest.stored_bytes,
        runtime=manifest.runtime,
        parent=None if manifest.parent is None else parse_tag(manifest.parent, field="parent"),
        sandboxes=0,
        directory=store.folder(tag),
        source=None if link is None or link.source is None else SandboxId(link.source),
        pause_ms=None if link is None else link.pause_ms,
    )
