"""Which snapshots there are, which are on their way, and whose.

What is on disk is what there is; this is its index, made at the start and kept since.
Whoever wants to write a snapshot claims its tag first, which is where everything that can
be refused is refused, and settles the claim when it has ended, whichever way.

Tags are one namespace for all tenants.  A tenant uses its own snapshots and those that are shared;
of others it learns no more than that their tags are taken.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from forkd.errors import (
    CapacityError,
    Conflict,
    Forbidden,
    NotFound,
    StoreError,
)
from forkd.limits import CHAIN_DEPTH_MAX, SNAPSHOTS_MAX, WRITING_WAIT_S
from forkd.model.caller import DEFAULT_OWNER, Owner, touch
from forkd.model.event import EventKind
from forkd.model.listing import some
from forkd.model.snapshot import (
    Snapshot,
    SnapshotStatus,
    check_name,
)
from forkd.service.ledger import stored as stored_amounts
from forkd.service.snapshots import stored
from forkd.service.snapshots.shelf import Shelf, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from forkd.model.caller import Caller, Tenant
    from forkd.model.ids import SandboxId, Tag
    from forkd.model.sandbox import Sandbox
    from forkd.service.journal import Journal
    from forkd.service.ledger import Ledger
    from forkd.service.records import Records
    from forkd.store.pending import PendingStore
    from forkd.store.snapshots import SnapshotStore

log = logging.getLogger(__name__)


class Catalog:
    """The snapshots of one host: those in the store, those that failed, those being written.

    Args:
        store: Where they are.
        pending: Where it is remembered that they are being written.
        records: Where it is remembered whose they are.
        ledger: Counts what tenants have.
        journal: Where it is noted what happens to them.
        users_of: Returns the sandboxes alive that go back to a snapshot.

    Attributes:
        shelf: What there is, whosever it is.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what it works with
        self,
        store: SnapshotStore,
        pending: PendingStore,
        records: Records,
        ledger: Ledger,
        journal: Journal,
        users_of: Callable[[Tag], tuple[Sandbox, ...]],
    ) -> None:
        self._store = store
        self._pending = pending
        self._records = records
        self._ledger = ledger
        self._journal = journal
        self._users_of = users_of
        self.shelf = Shelf()
        self._owners: dict[Tag, tuple[Owner, bool]] = {}

    async def load(self) -> None:
        """Read what is stored, what an earlier daemon was writing, and whose it is."""
        self._owners = await self._records.snapshot_owners()
        self.shelf.known = await asyncio.to_thread(stored.read_all, self._store)
        self.shelf.failed = await asyncio.to_thread(
            stored.read_failed, self.shelf.known, self._store, self._pending
        )
        for snapshot in self.shelf.known.values():
            self._count(snapshot.tag, snapshot.stored_bytes)

    # Looking

    def all(self) -> tuple[Snapshot, ...]:
        """Return every snapshot, by tag, those being written included."""
        return tuple(map(self.get, self.shelf.tags()))

    def visible(self, caller: Caller) -> tuple[Snapshot, ...]:
        """Return every snapshot that a caller may use, by tag."""
        return tuple(each for each in self.all() if may_use(caller, each))

    def get(self, tag: Tag) -> Snapshot:
        """Return one snapshot, whosever it is.

        Raises:
            NotFound: There is none of that tag.
        """
        found = self.shelf.find(tag)
        if found is None:
            raise _not_found(tag)
        under = self.shelf.ancestors(found)
        owner, shared = self._owners.get(tag, (DEFAULT_OWNER, False))
        return replace(
            found,
            depth=len(under),
            chain_bytes=found.stored_bytes + sum(each.stored_bytes for each in under),
            sandboxes=len(self._users_of(tag)),
            owner=owner,
            shared=shared,
        )

    def look_up(self, caller: Caller, tag: Tag) -> Snapshot:
        """Return one snapshot that a caller may use.

        Raises:
            NotFound: There is none of that tag, for this caller.
        """
        found = self.get(tag)
        if not may_use(caller, found):
            raise _not_found(tag)
        touch(tag)
        return found

    def look_up_own(self, caller: Caller, tag: Tag) -> Snapshot:
        """Return one snapshot that a caller may change.

        Raises:
            NotFound: There is none of that tag, for this caller.
            Forbidden: It is shared, and belongs to another tenant.
        """
        found = self.look_up(caller, tag)
        if not caller.may_touch(found.owner):
            raise Forbidden(f"snapshot {tag} is another tenant's; it is only shared", tag=tag)
        return found

    def named(self, caller: Caller, tags: Iterable[Tag]) -> str:
        """Return a few of these tags, and how many more there are; others' are only counted."""
        every = tuple(map(self.get, tags))
        return _some_of((each.tag, may_use(caller, each)) for each in every)

    def users_named(self, caller: Caller, tags: Iterable[Tag]) -> str:
        """Return a few of the sandboxes that go back to any of `tags`; others' are only counted.

        Empty if there are none.
        """
        return _some_of((each.id, caller.may_touch(each.owner)) for each in self.users(tags))

    def get_ready(self, tag: Tag) -> Snapshot:
        """Return one snapshot that can be forked.

        Raises:
            NotFound: There is none of that tag.
            Conflict: It is being written, or locked.
            StoreError: It is damaged, or could not be written.
        """
        snapshot = self.get(tag)
        if snapshot.status is SnapshotStatus.WRITING:
            raise Conflict(f"snapshot {tag} is still being written", tag=tag)
        if snapshot.status is SnapshotStatus.FAILED:
            raise StoreError(f"snapshot {tag} cannot be used: {snapshot.error}", tag=tag)
        self.shelf.check_unlocked(tag)
        return snapshot

    async def usable(self, caller: Caller, tag: Tag, *, wait: bool = False) -> Snapshot:
        """Return one snapshot that a caller may use and that can be forked.

        Args:
            caller: Who asks.
            tag: The snapshot.
            wait: Whether to wait, for `WRITING_WAIT_S`, for one that is being written.

        Raises:
            NotFound: There is none of that tag, for this caller, or its bake failed.
            Conflict: It is being written, or locked.
            StoreError: It is damaged, or could not be written.
        """
        self.look_up(caller, tag)
        write = self.shelf.writing.get(tag) if wait else None
        if write is not None:
            try:
                async with asyncio.timeout(WRITING_WAIT_S):
                    await write.ended.wait()
            except TimeoutError:
                log.warning("snapshot still being written", extra={"tag": tag})
        self.look_up(caller, tag)
        return self.get_ready(tag)

    def stored(self) -> tuple[Snapshot, ...]:
        """Return what is in the store, whole or damaged."""
        return tuple(map(self.get, self.shelf.known))

    def tenant_of(self, tag: Tag) -> Tenant:
        """Return whose a snapshot is."""
        owner, _ = self._owners.get(tag, (DEFAULT_OWNER, False))
        return owner.tenant

    def users(self, tags: Iterable[Tag]) -> tuple[Sandbox, ...]:
        """Return the sandboxes alive that go back to any of `tags`."""
        return tuple(sandbox for tag in tags for sandbox in self._users_of(tag))

    def chain(self, tag: Tag) -> tuple[Tag, ...]:
        """Return a snapshot's ancestors and itself, base first.

        Raises:
            NotFound: There is none of that tag.
        """
        under = self.shelf.ancestors(self.get(tag))
        return (*(each.tag for each in reversed(under)), tag)

    # Changing

    async def claim(  # noqa: PLR0913 - what is known of it
        self,
        tag: Tag,
        owner: Owner,
        parent: Tag | None = None,
        source: SandboxId | None = None,
        *,
        expected_bytes: int = 1,
        cached: bool = False,
    ) -> None:
        """Take a tag for a snapshot that is written from now on; end it with `settle`.

        Args:
            tag: Its name.
            owner: Whose it will be.
            parent: What it will be a difference against.
            source: The sandbox that it is taken of.
            expected_bytes: The most that it can take, as far as that is known; see `expect`.
            cached: Whether it may be removed for want of room.

        Raises:
            InvalidRequest: The tag is one of those that are kept for such snapshots.
            Conflict: The tag is taken, or what had it is being removed; the parent is not ready,
                or has `CHAIN_DEPTH_MAX` under it.
            CapacityError: There are too many snapshots.
            NotFound: There is no such parent.
            StoreError: The parent is damaged, or the claim could not be written down.
            QuotaExceeded: The tenant may not have so much stored.
        """
        made = self.check_claim(tag, parent, cached=cached)
        self._ledger.check(owner.tenant, stored_amounts(expected_bytes))
        before = self.shelf.failed.pop(tag, None)
        self.shelf.writing[tag] = Write(replace(made, source=source))
        self._owners[tag] = owner, False
        self._count(tag, expected_bytes)
        touch(tag)
        try:
            await self._records.put_snapshot_owner(tag, owner)
        except BaseException:
            self.settle(tag)
            if before is not None:
                self.shelf.failed[tag] = before
            raise
        self._note(EventKind.SNAPSHOT_WRITING, tag, parent=parent, source=source)

    def expect(self, tag: Tag, expected_bytes: int) -> None:
        """Note how much a snapshot takes that is claimed or compacted, or can take; before it does.

        Raises:
            QuotaExceeded: The tenant may not have so much stored; it counts as before.
        """
        self._ledger.recount(_key(tag), self.tenant_of(tag), stored_amounts(expected_bytes))

    def check_claim(self, tag: Tag, parent: Tag | None = None, *, cached: bool = False) -> Snapshot:
        """Return what `claim` would note; raises what it would raise."""
        check_name(tag, cached=cached)
        if tag in self.shelf.writing:
            raise Conflict(f"snapshot {tag} is being written already", tag=tag)
        if tag in self.shelf.known:
            raise Conflict(f"snapshot {tag} exists; choose another tag, or delete it", tag=tag)
        self.shelf.check_unlocked(tag)
        if len(self.shelf.known) + len(self.shelf.writing) >= SNAPSHOTS_MAX:
            raise CapacityError(f"there are {SNAPSHOTS_MAX} snapshots already")
        made = stored.placeholder(tag, self._store)
        return made if parent is None else _over(self.get_ready(parent), made)

    def note_pause(self, tag: Tag, pause_ms: float) -> None:
        """Note how long the source of a claimed snapshot was paused."""
        write = self.shelf.writing[tag]
        write.snapshot = replace(write.snapshot, pause_ms=pause_ms)

    def settle(
        self, tag: Tag, snapshot: Snapshot | None = None, *, error: str | None = None
    ) -> None:
        """End a claim: with a snapshot that is there, one that failed, or nothing at all."""
        write = self.shelf.writing.pop(tag)
        if snapshot is not None:
            self.shelf.known[tag] = snapshot
            self._count(tag, snapshot.stored_bytes)
            self._note(EventKind.SNAPSHOT_READY, tag, stored_bytes=snapshot.stored_bytes)
        else:
            self._ledger.release(_key(tag))
            self._note(EventKind.SNAPSHOT_FAILED, tag, error=error)
        if error is not None:
            self.shelf.failed[tag] = replace(
                write.snapshot, status=SnapshotStatus.FAILED, error=error
            )
        write.ended.set()

    async def share(self, tag: Tag, *, shared: bool) -> None:
        """Have every tenant use a snapshot, or only its own.

        Raises:
            StoreError: It could not be written down.
        """
        owner, _ = self._owners.get(tag, (DEFAULT_OWNER, False))
        await self._records.put_snapshot_owner(tag, owner, shared=shared)
        self._owners[tag] = owner, shared

    async def read(self, tag: Tag) -> Snapshot:
        """Return what the store has under `tag` now; a damaged snapshot is `failed`."""
        return await asyncio.to_thread(stored.read, tag, self._store)

    def add(self, snapshot: Snapshot) -> None:
        """Note what the store has from now on."""
        self.shelf.known[snapshot.tag] = snapshot
        self.shelf.failed.pop(snapshot.tag, None)
        self._count(snapshot.tag, snapshot.stored_bytes)

    def forget(self, tag: Tag) -> None:
        """Note that a snapshot is not there any more; those that depend on it have failed."""
        self._note(EventKind.SNAPSHOT_DELETED, tag)
        self.shelf.known.pop(tag, None)
        self.shelf.failed.pop(tag, None)
        self._owners.pop(tag, None)
        self._ledger.release(_key(tag))
        for each in self.shelf.descendants(tag):
            broken = self.shelf.known[each]
            error = f"{each} depends on {tag}, which is missing"
            self.shelf.known[each] = replace(broken, status=SnapshotStatus.FAILED, error=error)

    def _count(self, tag: Tag, size_bytes: int) -> None:
        self._ledger.count(_key(tag), self.tenant_of(tag), stored_amounts(size_bytes))

    def _note(self, kind: EventKind, tag: Tag, **detail: str | float | None) -> None:
        owner, _ = self._owners.get(tag, (DEFAULT_OWNER, False))
        self._journal.note(kind, tag, owner, **detail)


def may_use(caller: Caller, snapshot: Snapshot) -> bool:
    """Whether a snapshot exists for this caller."""
    return snapshot.shared or caller.may_touch(snapshot.owner)


def _key(tag: Tag) -> str:
    """Return under what the ledger counts a snapshot."""
    return f"snapshot:{tag}"


def _not_found(tag: Tag) -> NotFound:
    return NotFound(f"no snapshot {tag!r}", tag=tag)


def _some_of(names: Iterable[tuple[str, bool]]) -> str:
    """Return a few of the names that may be said, and how many more there are."""
    every = tuple(names)
    said = [name for name, may_be_said in every if may_be_said]
    hidden = len(every) - len(said)
    words = [some(said)] if said else []
    return " and ".join([*words, f"{hidden} of other tenants"] if hidden else words)


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
