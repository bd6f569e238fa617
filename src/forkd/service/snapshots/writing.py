"""Durable snapshots of running sandboxes, and flattening chains.

    claim the tag -> record it -> take a seed -> the seed writes -> publish -> drop the record

The seed writes aside while source and siblings run.  Until the snapshot has its name it is
`writing`; what ends before that leaves nothing of it but, if nobody waited, the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.engine.configs import LinkConfig
from forkd.errors import CapacityError, Conflict, ForkdError
from forkd.model.ids import parse_tag
from forkd.service.registry import from_manifest, some
from forkd.service.tasks import to_end
from forkd.store.manifest import REPLACES_MAX, Link, StoredFile
from forkd.store.pending import Record
from forkd.store.snapshots import MEMORY_FILE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from contextlib import AbstractAsyncContextManager, AsyncExitStack
    from pathlib import Path

    from forkd.engine.replies import SavedFile
    from forkd.model.ids import Tag
    from forkd.model.sandbox import Sandbox
    from forkd.model.snapshot import Snapshot
    from forkd.service.registry import Registry
    from forkd.service.seeds import Seed
    from forkd.service.tasks import TaskOwner
    from forkd.service.zygotes import Chain, ZygotePool
    from forkd.store.manifest import Manifest
    from forkd.store.pending import PendingStore
    from forkd.store.snapshots import SnapshotStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkTools:
    """What links need of the rest of the service.

    Attributes:
        tasks: Who owns writes.
        store: Where snapshots are.
        pending: Where it is remembered that they are being written.
        registry: Which there are.
        zygotes: What writes a flattened chain.
        chain: Returns the links of a snapshot with their files; blocks.
    """

    tasks: TaskOwner
    store: SnapshotStore
    pending: PendingStore
    registry: Registry
    zygotes: ZygotePool
    chain: Callable[[Tag], Chain]


Writing = asyncio.Task["ForkdError | None"]
"""A snapshot that is being written; gives the error that ended it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A durable snapshot that is to be written; `start` or `give_up` ends it."""

    tag: Tag
    parent: Tag
    record: Record


class Links:
    """Writes links of chains, and makes one of several."""

    def __init__(self, tools: LinkTools) -> None:
        self._tools = tools

    async def snapshot(
        self,
        tag: Tag,
        source: Sandbox,
        take: Callable[[], AbstractAsyncContextManager[Seed]],
        *,
        wait: bool,
    ) -> Snapshot:
        """Write a running sandbox down under `tag`, over the snapshot that it goes back to.

        It is written to its end even if the caller goes away meanwhile.

        Args:
            tag: Its name.
            source: The sandbox.
            take: Branches it.
            wait: Whether to return when it is ready, or as soon as the sandbox goes on.

        Raises:
            Conflict: The tag is taken, or the chain is as long as it may be.
            CapacityError: The disk is full; nothing was left on it.
            ForkdError: The sandbox could not be branched, or its seed not write.
        """
        claim = await self.begin(tag, source)
        work = self._take_and_start(claim, take, keep_error=not wait)
        try:
            task = self._tools.tasks.spawn(work, name=f"branch {source.id} for {tag}")
        except Conflict as error:
            await self.give_up(claim, error)
            raise
        outcome = await asyncio.shield(task)
        if isinstance(outcome, ForkdError):
            raise outcome
        if wait:
            await self.ended(outcome)
        return self._tools.registry.get(tag)

    async def _take_and_start(
        self,
        claim: Claim,
        take: Callable[[], AbstractAsyncContextManager[Seed]],
        *,
        keep_error: bool,
    ) -> Writing | ForkdError:
        """Take a seed and have it write; returns the error if there was none to take."""
        try:
            async with take() as seed:
                return await self.start(claim, seed, keep_error=keep_error)
        except ForkdError as error:
            await self.give_up(claim, None)
            return error

    async def begin(self, tag: Tag, source: Sandbox) -> Claim:
        """Claim a tag for a durable snapshot of a sandbox, before anything is made for it.

        Raises:
            Conflict: The tag is taken, the snapshot under it not ready, or the chain too long.
            CapacityError: There are too many snapshots, or the disk is full.
            ForkdError: The snapshot under it is missing or damaged.
        """
        registry, parent = self._tools.registry, source.tag
        registry.claim(tag, parent, source.id)
        record = Record(tag=tag, created_at=datetime.now(UTC), parent=parent, source=source.id)
        try:
            await to_end(asyncio.to_thread(self._tools.pending.put, record))
        except ForkdError as error:
            registry.settle(tag)
            raise _store_error(tag, error) from error
        except BaseException:
            await self.give_up(Claim(tag, parent, record), None)
            raise
        return Claim(tag, parent, record)

    async def start(self, claim: Claim, seed: Seed, *, keep_error: bool) -> Writing:
        """Have a seed write what was claimed; returns as soon as that is under way.

        Args:
            claim: From `begin`; ended by the writing, however that ends.
            seed: Of the sandbox that was claimed for; held until then.
            keep_error: Whether a failure stays to be seen, because nobody waits for it.

        Raises:
            Conflict: The service does not run.
        """
        self._tools.registry.note_pause(claim.tag, seed.pause_ms)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(seed)
            work = self._write(claim, seed, stack.pop_all(), keep_error=keep_error)
            return self._tools.tasks.spawn(work, name=f"write {claim.tag}")

    async def ended(self, writing: Writing) -> None:
        """Wait until a snapshot is written; it goes on if the caller goes away.

        Raises:
            CapacityError: The disk is full; nothing was left on it.
            ForkdError: The seed could not write; nothing was left.
        """
        outcome = await asyncio.shield(writing)
        if outcome is not None:
            raise outcome

    async def _write(
        self, claim: Claim, seed: Seed, held: AsyncExitStack, *, keep_error: bool
    ) -> ForkdError | None:
        """Write and publish; returns the error that ended it."""
        tools = self._tools
        async with held:
            try:
                manifest = await self._write_staged(claim, seed)
            except ForkdError as error:
                clear = _store_error(claim.tag, error)
                await self.give_up(claim, clear if keep_error else None)
                return clear
        # Cancelled, we are being stopped: the record stays and becomes a failure.
        snapshot = from_manifest(manifest, tools.store)
        await to_end(asyncio.to_thread(tools.pending.remove, claim.tag))
        tools.registry.settle(claim.tag, snapshot)
        log.info("snapshot written", extra={"tag": claim.tag, "bytes": snapshot.stored_bytes})
        return None

    async def give_up(self, claim: Claim, error: ForkdError | None) -> None:
        """End a claim of which nothing came; `error` stays to be seen."""
        pending = self._tools.pending
        if error is None:
            await to_end(asyncio.to_thread(pending.remove, claim.tag))
            self._tools.registry.settle(claim.tag)
            return
        log.warning("snapshot failed", extra={"tag": claim.tag, "error": str(error)})
        failed = claim.record.model_copy(update={"error": str(error)})
        try:
            await to_end(asyncio.to_thread(pending.put, failed))
        except ForkdError:  # on a full disk the record is as it was, and means the same
            log.warning("failure not recorded", extra={"tag": claim.tag})
        self._tools.registry.settle(claim.tag, error=str(error))

    async def _write_staged(self, claim: Claim, seed: Seed) -> Manifest:
        store = self._tools.store
        staged = await asyncio.to_thread(store.stage)
        try:
            chain = await asyncio.to_thread(store.load_chain, claim.parent)
            memory = tuple(_memory(store, link) for link in chain)
            saved = await seed.save(staged, memory=memory, disk_layers=1 + len(chain))
            manifest = _manifest(claim, chain[-1], saved, seed.pause_ms)
            await to_end(asyncio.to_thread(store.publish, staged, manifest))
            return manifest
        finally:
            await to_end(asyncio.to_thread(store.discard, staged))

    # Compacting

    async def compact(self, tag: Tag, to: Tag | None) -> Snapshot:
        """Write a snapshot so that it needs no other: in its place, or under another name.

        Its own children stand on it as before.  A crash leaves the old snapshot or the new one.

        Raises:
            Conflict: It is not ready, the other tag is taken, or, in its place, sandboxes that
                go back to it or its descendants are alive, or one of these is being written.
            CapacityError: The disk is full; nothing was changed.
            ForkdError: It does not load, or could not be written.
        """
        registry = self._tools.registry
        snapshot = registry.get_ready(tag)
        if to is not None:
            return await self._compact_to(tag, to)
        if snapshot.depth == 0:
            return snapshot
        affected = self._check_unused(tag)
        registry.hold(affected, "being compacted")
        try:
            work = self._compact_in_place(tag, affected)
            task = self._tools.tasks.spawn(_outcome(tag, work), name=f"compact {tag}")
            task.add_done_callback(lambda _: registry.release(affected))
        except Conflict:
            registry.release(affected)
            raise
        outcome = await asyncio.shield(task)
        if isinstance(outcome, ForkdError):
            raise outcome
        return registry.get(tag)

    async def _compact_to(self, tag: Tag, to: Tag) -> Snapshot:
        registry = self._tools.registry
        registry.claim(to)
        try:
            task = self._tools.tasks.spawn(
                _outcome(to, self._flatten(tag, to)), name=f"compact {tag} to {to}"
            )
        except Conflict:
            registry.settle(to)
            raise
        task.add_done_callback(lambda done: registry.settle(to, _snapshot_of(done)))
        outcome = await asyncio.shield(task)
        if isinstance(outcome, ForkdError):
            raise outcome
        return registry.get(to)

    def _check_unused(self, tag: Tag) -> tuple[Tag, ...]:
        """Return `tag` and its descendants, if nothing uses any of them."""
        registry, zygotes = self._tools.registry, self._tools.zygotes
        affected = (tag, *registry.descendants(tag))
        users = registry.users(affected)
        if users:
            raise Conflict(
                f"snapshot {tag} cannot be compacted while sandboxes go back to it: "
                f"{some(users)}; compact it to another tag",
                tag=tag,
            )
        for each in affected:
            registry.get_ready(each)
            if zygotes.in_use(each):
                raise Conflict(f"snapshot {each} is being forked", tag=each)
        return affected

    async def _compact_in_place(self, tag: Tag, affected: Iterable[Tag]) -> Snapshot:
        tools = self._tools
        snapshot = await self._flatten(tag, tag)
        for each in reversed(tuple(affected)):
            # They have the layers of the chain as it was.
            await tools.zygotes.stop(each)
        tools.registry.add(snapshot)
        return snapshot

    async def _flatten(self, tag: Tag, to: Tag) -> Snapshot:
        tools, store = self._tools, self._tools.store
        staged = await asyncio.to_thread(store.stage)
        try:
            manifest = await asyncio.to_thread(store.load, tag)
            async with tools.zygotes.lease(tag, lambda: tools.chain(tag)) as zygote:
                saved = await zygote.save_link(LinkConfig(staged, (), disk_layers=1))
            flat = _flat(manifest, to, saved)
            put = store.replace if to == tag else store.publish
            await to_end(asyncio.to_thread(put, staged, flat))
            log.info("snapshot compacted", extra={"tag": tag, "to": to})
            return from_manifest(flat, store)
        finally:
            await to_end(asyncio.to_thread(store.discard, staged))


async def _outcome(tag: Tag, work: Awaitable[Snapshot]) -> Snapshot | ForkdError:
    """Return the error that ended `work`, so that whoever waits raises it."""
    try:
        return await work
    except ForkdError as error:
        return _store_error(tag, error)


def _snapshot_of(task: asyncio.Task[Snapshot | ForkdError]) -> Snapshot | None:
    outcome = None if task.cancelled() or task.exception() else task.result()
    return None if isinstance(outcome, ForkdError) else outcome


def _memory(store: SnapshotStore, link: Manifest) -> Path:
    return store.folder(parse_tag(link.tag)) / MEMORY_FILE


def _store_error(tag: Tag, error: ForkdError) -> ForkdError:
    """Return what to say of a snapshot that could not be written."""
    if isinstance(error, CapacityError):
        return CapacityError(
            f"the disk has no room for snapshot {tag}: {error}; give the state folder more, or "
            "remove what is not needed (forkd snapshot rm, forkd snapshot gc)",
            tag=tag,
        )
    return error


def _manifest(
    claim: Claim, parent: Manifest, saved: tuple[SavedFile, ...], pause_ms: float
) -> Manifest:
    """Return the manifest of a link over `parent`, which it is alike."""
    link = Link(parent_digest=parent.digest, source=claim.record.source, pause_ms=pause_ms)
    changed = {
        "tag": claim.tag,
        "created_at": claim.record.created_at,
        "parent": claim.parent,
        "files": _stored(saved),
        "link": link,
    }
    return parent.model_copy(update=changed)


def _flat(manifest: Manifest, tag: Tag, saved: tuple[SavedFile, ...]) -> Manifest:
    """Return the manifest of a snapshot that was flattened; its children may stand on it."""
    old = manifest.link or Link()
    replaces: tuple[str, ...] = ()
    if manifest.tag == tag:
        replaces = (*old.replaces, manifest.digest)[-REPLACES_MAX:]
    link = Link(replaces=replaces, source=old.source, pause_ms=old.pause_ms)
    changed = {"tag": tag, "parent": None, "files": _stored(saved), "link": link}
    return manifest.model_copy(update=changed)


def _stored(saved: tuple[SavedFile, ...]) -> tuple[StoredFile, ...]:
    return tuple(
        StoredFile.model_validate({"name": f.name, "bytes": f.bytes, "digest": f.digest})
        for f in saved
    )
