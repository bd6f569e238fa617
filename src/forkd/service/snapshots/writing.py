"""Write running machines down, as links over the snapshots that they go back to.

    async with writer.claim(tag, sandbox, owner) as claim:
        async with seed_of(...) as seed:
            claim.write(seed)           # in the background; the seed lives until it is written
        await claim.written()           # or not, if nobody waits

A link is a parent and what differs from it: pages that the machine has written and the disk layer
that it wrote, at one instant.  The seed writes them while its source goes on; the files appear in
the store together, by one rename, or not at all.  A record says before anything is made that a
tag is being written, so that a daemon that starts after a crash can say what failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.errors import CapacityError, ForkdError
from forkd.model.ids import parse_tag
from forkd.service.ledger import most_stored_bytes, seed_key
from forkd.service.snapshots.stored import from_manifest
from forkd.service.staging import staged_folder
from forkd.service.supervision import TaskKind, to_end
from forkd.store.manifest import Config, Link, StoredFile
from forkd.store.pending import Record
from forkd.store.snapshots import MEMORY_FILE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable
    from pathlib import Path

    from forkd.engine.replies import SavedFile
    from forkd.model.caller import Owner, Tenant
    from forkd.model.ids import Tag
    from forkd.model.image import ImageConfig
    from forkd.model.sandbox import Sandbox
    from forkd.model.snapshot import BuiltLink, Snapshot
    from forkd.model.tenant import Amounts
    from forkd.service.ledger import Ledger
    from forkd.service.seeds import Seed
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.supervision import Supervisor, Task
    from forkd.store.manifest import Manifest
    from forkd.store.pending import PendingStore
    from forkd.store.snapshots import SnapshotStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkWriter:
    """Writes links.

    Attributes:
        tasks: Runs writes.
        store: Where snapshots are.
        pending: Where it is remembered that they are being written.
        catalog: Which there are.
    """

    tasks: Supervisor
    store: SnapshotStore
    pending: PendingStore
    catalog: Catalog

    @contextlib.asynccontextmanager
    async def claim(
        self,
        tag: Tag,
        source: Sandbox,
        owner: Owner,
        *,
        wait: bool,
        built: BuiltLink | None = None,
    ) -> AsyncGenerator[Claim, None]:
        """Claim a tag for a durable snapshot of a sandbox, before anything is made for it.

        A claim that was not written at the end of the block is given up.

        Args:
            tag: Its name.
            source: The sandbox.
            owner: Whose the snapshot will be.
            wait: Whether somebody waits until it is written; else a failure stays to be seen.
            built: What it is, if a build makes it.

        Raises:
            Conflict: The tag is taken, the snapshot under it not ready, or the chain too long.
            QuotaExceeded: It could be more than its tenant may have stored.
            CapacityError: There are too many snapshots, or the disk is full.
            ForkdError: The snapshot under it is missing or damaged.
        """
        expected_bytes = most_stored_bytes(self.catalog.get(source.tag), source.disk_limit_mib)
        cached = built is not None and built.cached
        about = (tag, owner, source.tag, source.id)
        await self.catalog.claim(*about, expected_bytes=expected_bytes, cached=cached)
        record = Record(tag=tag, created_at=datetime.now(UTC), parent=source.tag, source=source.id)
        claim = Claim(self, record, tag, source.tag, keep_error=not wait, built=built)
        try:
            await self._put(record)
            yield claim
        finally:
            if claim.writing is None:
                await to_end(self.give_up(claim, None))

    async def give_up(self, claim: Claim, error: ForkdError | None) -> None:
        """End a claim of which nothing came; `error` stays to be seen."""
        if error is None:
            try:
                await to_end(asyncio.to_thread(self.pending.remove, claim.tag))
            finally:
                self.catalog.settle(claim.tag)
            return
        log.warning("snapshot failed", extra={"tag": claim.tag, "error": str(error)})
        failed = claim.record.model_copy(update={"error": str(error)})
        try:
            await self._put(failed)
        except ForkdError:  # on a full disk the record is as it was, and means the same
            log.warning("failure not recorded", extra={"tag": claim.tag})
        self.catalog.settle(claim.tag, error=str(error))

    async def write(self, claim: Claim, seed: Seed) -> None:
        """Write and publish a claim, then release its seed; for `Claim.write`.

        Raises:
            CapacityError: The disk is full; nothing was left on it.
            QuotaExceeded: Its tenant may not have so much stored; nothing was left.
            ForkdError: The seed could not write; nothing was left.
        """
        try:
            manifest = await self._write_staged(claim, seed)
        except ForkdError as error:
            clear = store_error(claim.tag, error)
            await self.give_up(claim, clear if claim.keep_error else None)
            raise clear from error
        finally:
            await seed.release()
        # Cancelled, we are being stopped: the record stays and becomes a failure.
        snapshot = from_manifest(manifest, self.store, cached=claim.cached)
        try:
            await to_end(asyncio.to_thread(self.pending.remove, claim.tag))
        except ForkdError as error:  # the next start sees that the snapshot is there
            log.warning("record not removed", extra={"tag": claim.tag, "error": str(error)})
        finally:
            self.catalog.settle(claim.tag, snapshot)
        log.info("snapshot written", extra={"tag": claim.tag, "bytes": snapshot.stored_bytes})

    async def _write_staged(self, claim: Claim, seed: Seed) -> Manifest:
        store = self.store
        async with staged_folder(store) as staged:
            chain = await asyncio.to_thread(store.load_chain, claim.parent)
            memory = tuple(_memory(store, link) for link in chain)
            saved = await seed.save(staged, memory=memory, disk_layers=1 + len(chain))
            self.catalog.expect(claim.tag, sum(file.bytes for file in saved))
            manifest = _manifest(claim, chain[-1], saved, seed.pause_ms)
            if claim.cached:
                await asyncio.to_thread(store.mark_cached, staged)
            await to_end(asyncio.to_thread(store.publish, staged, manifest))
            return manifest

    async def _put(self, record: Record) -> None:
        try:
            await to_end(asyncio.to_thread(self.pending.put, record))
        except ForkdError as error:
            raise store_error(parse_tag(record.tag), error) from error


@dataclass(slots=True)
class Claim:
    """A durable snapshot that is to be written.

    Attributes:
        record: How it is remembered meanwhile.
        tag: Its name.
        parent: What it is a difference against.
        keep_error: Whether a failure stays to be seen, because nobody waits for it.
        built: What it is, if a build makes it.
        writing: The task that writes it; None before that.
    """

    writer: LinkWriter
    record: Record
    tag: Tag
    parent: Tag
    keep_error: bool
    built: BuiltLink | None = None
    writing: Task[None] | None = None

    @property
    def cached(self) -> bool:
        """Whether it may be removed for want of room."""
        return self.built is not None and self.built.cached

    def write(self, seed: Seed) -> None:
        """Have a seed write what was claimed, in the background.

        Args:
            seed: Of the sandbox that was claimed for; it lives until it is written.

        Raises:
            Conflict: The service is stopping.
        """
        self.writer.catalog.note_pause(self.tag, seed.pause_ms)
        work = self.writer.write(self, seed)
        self.writing = self.writer.tasks.run(TaskKind.WRITE, work, self.tag)
        seed.hold()

    def count(self, ledger: Ledger, seed: Seed, tenant: Tenant, amounts: Amounts) -> None:
        """Count a seed for as long as it writes, who counted otherwise until now."""
        if self.writing is None:
            return
        key, holder = seed_key(seed.process.pid), f"snapshot:{self.tag}"
        ledger.share(key, holder, tenant, amounts)
        self.writing.when_done(lambda: ledger.let_go(key, holder))

    async def written(self) -> Snapshot:
        """Return the snapshot when it is written; that goes on if the caller goes away.

        Raises:
            CapacityError: The disk is full; nothing was left on it.
            ForkdError: The seed could not write; nothing was left.
        """
        if self.writing is not None:
            await self.writing
        return self.snapshot

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot as it is now."""
        return self.writer.catalog.get(self.tag)


def store_error(tag: Tag, error: ForkdError) -> ForkdError:
    """Return the error of a snapshot that could not be written, with the way out.

    An error that says when to ask again is about the host's other work, not about its disk.
    """
    if isinstance(error, CapacityError) and "retry_after_s" not in error.context:
        return CapacityError(
            f"the disk has no room for snapshot {tag}: {error}; give the state folder more, or "
            "remove what is not needed (forkd snapshot rm, forkd snapshot gc)",
            tag=tag,
        )
    return error


def stored_files(saved: Iterable[SavedFile]) -> tuple[StoredFile, ...]:
    """Return the files of a snapshot as its manifest names them."""
    return tuple(
        StoredFile.model_validate({"name": f.name, "bytes": f.bytes, "digest": f.digest})
        for f in saved
    )


def config_of(config: ImageConfig) -> Config:
    """Return an image's configuration as manifests have it."""
    return Config(**asdict(config))


def _memory(store: SnapshotStore, link: Manifest) -> Path:
    return store.folder(parse_tag(link.tag)) / MEMORY_FILE


def _manifest(
    claim: Claim, parent: Manifest, saved: tuple[SavedFile, ...], pause_ms: float
) -> Manifest:
    """Return the manifest of a link over `parent`, which it is alike."""
    link = Link(parent_digest=parent.digest, source=claim.record.source, pause_ms=pause_ms)
    changed: dict[str, object] = {
        "tag": claim.tag,
        "created_at": claim.record.created_at,
        "parent": claim.parent,
        "files": stored_files(saved),
        "link": link,
        "build_key": None,
    }
    if (built := claim.built) is not None:
        changed |= {"config": config_of(built.config), "build_key": built.key}
        said = {"recipe": built.recipe, "runtime": built.runtime}
        changed |= {name: value for name, value in said.items() if value is not None}
    return parent.model_copy(update=changed)
