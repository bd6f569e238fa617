"""Write a snapshot so that it needs no other: in its place, or under another name."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.engine.configs import LinkConfig
from forkd.errors import Conflict, ForkdError
from forkd.model.caller import Scope
from forkd.service.jail import lent
from forkd.service.snapshots.stored import from_manifest
from forkd.service.snapshots.writing import store_error, stored_files
from forkd.service.staging import staged_folder
from forkd.service.supervision import TaskKind, to_end
from forkd.service.use_case import use_case
from forkd.store.manifest import REPLACES_MAX, Link

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.engine.replies import SavedFile
    from forkd.model.caller import Caller
    from forkd.model.ids import Tag
    from forkd.model.snapshot import Snapshot
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.supervision import Supervisor
    from forkd.service.zygotes import ZygotePool
    from forkd.store.manifest import Manifest
    from forkd.store.snapshots import SnapshotStore
    from forkd.telemetry.telemetry import Telemetry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compaction:
    """Compacts chains; it goes on to its end if whoever asked goes away.

    Attributes:
        tasks: Runs it.
        store: Where snapshots are.
        catalog: Which there are.
        zygotes: What writes a flattened chain.
    """

    telemetry: Telemetry
    tasks: Supervisor
    store: SnapshotStore
    catalog: Catalog
    zygotes: ZygotePool

    @use_case("compact", Scope.SNAPSHOTS)
    async def compact(self, caller: Caller, tag: Tag, to: Tag | None) -> Snapshot:
        """Compact a snapshot; `forkd.service.api.Chains` documents it."""
        snapshot = await self.catalog.usable(caller, tag)
        if to is not None:
            await self.catalog.claim(to, caller.owner, expected_bytes=snapshot.chain_bytes)
            with contextlib.ExitStack() as undo:
                undo.callback(self.catalog.settle, to)
                task = self.tasks.run(TaskKind.COMPACT, self._compact_to(tag, to), tag)
                undo.pop_all()
        elif snapshot.depth == 0:
            return snapshot
        else:
            self.catalog.look_up_own(caller, tag)
            affected = self._check_unused(caller, tag)
            with contextlib.ExitStack() as undo:
                undo.enter_context(self._growing(snapshot))
                undo.enter_context(self.catalog.shelf.locked(affected, "being compacted"))
                task = self.tasks.run(TaskKind.COMPACT, self._compact_in_place(tag, affected), tag)
                task.when_done(undo.pop_all().close)
        await task
        return self.catalog.get(tag if to is None else to)

    @contextlib.contextmanager
    def _growing(self, snapshot: Snapshot) -> Iterator[None]:
        """Have a snapshot count as a copy of all of its chain, the most that it can become.

        Raises:
            QuotaExceeded: Its tenant may not have so much stored.
        """
        self.catalog.expect(snapshot.tag, snapshot.chain_bytes)
        try:
            yield
        finally:
            self.catalog.add(self.catalog.shelf.known[snapshot.tag])

    def _check_unused(self, caller: Caller, tag: Tag) -> tuple[Tag, ...]:
        """Return `tag` and its descendants, if nothing uses any of them."""
        affected = (tag, *self.catalog.shelf.descendants(tag))
        users = self.catalog.users_named(caller, affected)
        if users:
            raise Conflict(
                f"snapshot {tag} cannot be compacted while sandboxes go back to it: "
                f"{users}; compact it to another tag",
                tag=tag,
            )
        for each in affected:
            self.catalog.get_ready(each)
            if self.zygotes.in_use(each):
                raise Conflict(f"snapshot {each} is being forked", tag=each)
        return affected

    async def _compact_in_place(self, tag: Tag, affected: tuple[Tag, ...]) -> None:
        """Compact `tag`; it and its descendants are locked."""
        self.catalog.add(await self._flatten(tag, tag))
        for each in reversed(affected):
            # Their zygotes have the layers of the chain as it was.
            await self.zygotes.stop_or_log(each)

    async def _compact_to(self, tag: Tag, to: Tag) -> None:
        snapshot = None
        try:
            snapshot = await self._flatten(tag, to)
        finally:
            self.catalog.settle(to, snapshot)

    async def _flatten(self, tag: Tag, to: Tag) -> Snapshot:
        store = self.store
        try:
            async with staged_folder(store) as staged:
                manifest = await asyncio.to_thread(store.load, tag)
                async with self.zygotes.lease(tag) as zygote:
                    part = self.zygotes.part(tag)
                    async with lent(staged, None if part is None else part.uid):
                        saved = await zygote.save_link(LinkConfig(staged, (), disk_layers=1))
                flat = _flat(manifest, to, saved)
                put = store.replace if to == tag else store.publish
                await to_end(asyncio.to_thread(put, staged, flat))
        except ForkdError as error:
            raise store_error(to, error) from error
        log.info("snapshot compacted", extra={"tag": tag, "to": to})
        return from_manifest(flat, store)


def _flat(manifest: Manifest, tag: Tag, saved: tuple[SavedFile, ...]) -> Manifest:
    """Return the manifest of a snapshot that was flattened; its children may depend on it."""
    old = manifest.link or Link()
    replaces: tuple[str, ...] = ()
    if manifest.tag == tag:
        replaces = (*old.replaces, manifest.digest)[-REPLACES_MAX:]
    link = Link(replaces=replaces, source=old.source, pause_ms=old.pause_ms)
    changed = {"tag": tag, "parent": None, "files": stored_files(saved), "link": link}
    return manifest.model_copy(update=changed)
