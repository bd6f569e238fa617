"""Remove snapshots, and what is unused."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import BuildError, Conflict, ForkdError, InvalidRequest
from forkd.host import files
from forkd.images import initramfs
from forkd.images.layout import Cache
from forkd.model.caller import Scope
from forkd.model.snapshot import Removed, SnapshotStatus
from forkd.service.supervision import to_end
from forkd.service.use_case import use_case

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forkd.model.caller import Caller
    from forkd.model.ids import Tag
    from forkd.model.snapshot import Snapshot
    from forkd.service.recipes import Recipes
    from forkd.service.records import Records
    from forkd.service.settings import HostSettings
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.zygotes import ZygotePool
    from forkd.store.pending import PendingStore
    from forkd.store.snapshots import SnapshotStore
    from forkd.telemetry.telemetry import Telemetry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Removes snapshots; `forkd.service.api.Snapshots` documents what a caller may ask.

    Attributes:
        settings: Where the cache is.
        store: Where snapshots are.
        pending: Where it is remembered which are being written.
        records: Where it is remembered whose they are.
        catalog: Which there are.
        zygotes: Those of snapshots in use.
        recipes: Which were uploaded.
    """

    telemetry: Telemetry
    settings: HostSettings
    store: SnapshotStore
    pending: PendingStore
    records: Records
    catalog: Catalog
    zygotes: ZygotePool
    recipes: Recipes

    @use_case("delete_snapshot", Scope.SNAPSHOTS)
    async def delete(
        self, caller: Caller, tag: Tag, *, cascade: bool = False, force: bool = False
    ) -> None:
        """Remove a snapshot."""
        if cascade and force:
            raise InvalidRequest("cascade and force exclude each other", field="force")
        self.catalog.look_up_own(caller, tag)
        descendants = self.catalog.shelf.descendants(tag)
        if self.catalog.get(tag).status is SnapshotStatus.WRITING:
            raise Conflict(f"snapshot {tag} is being written", tag=tag)
        dependents = self.catalog.shelf.dependents(tag)
        if dependents and not cascade and not force:
            raise Conflict(
                f"snapshot {tag} is the parent of {self.catalog.named(caller, dependents)}; delete "
                "those first, or with cascade",
                tag=tag,
            )
        if any(not caller.may_touch(self.catalog.get(each).owner) for each in descendants):
            raise Conflict(f"another tenant's snapshots depend on snapshot {tag}", tag=tag)
        self._check_unused(caller, (*descendants, tag))
        removed = (*descendants, tag) if cascade else (tag,)
        with self.catalog.shelf.locked((*descendants, tag), "being removed"):
            for each in removed:
                await to_end(self._remove(each))
            for each in descendants:
                await self.zygotes.stop_or_log(each)
        await self.drop_unused_images()

    @use_case("tidy", Scope.ADMIN)
    async def tidy(self, caller: Caller, *, dry_run: bool = False) -> tuple[Removed, ...]:
        """Remove what is unused: leftovers, records of failures, orphans, unused images.

        Archives that machines with an earlier agent were booted from go as well, and uploaded
        recipes that no build has used for long.

        An orphan is a snapshot whose chain lacks a link; one whose chain is damaged stays, since
        the damage may be repaired.  What is in use stays as well.
        """
        removed = await self._tidy_snapshots(dry_run=dry_run)
        removed += await to_end(self._tidy_files(dry_run=dry_run))
        removed += await to_end(asyncio.to_thread(self._tidy_cache, dry_run=dry_run))
        removed += await to_end(self.recipes.tidy(dry_run=dry_run))
        return tuple(removed)

    async def evict(self, tag: Tag) -> bool:
        """Remove a snapshot that may go, unless somebody needs it; return whether it went.

        Raises:
            ForkdError: It could not be removed.
        """
        if not self.may_evict(tag):
            return False
        with self.catalog.shelf.locked([tag], "being removed"):
            await to_end(self._remove(tag))
        log.info("cached snapshot removed to make room", extra={"tag": tag})
        await self.drop_unused_images()
        return True

    def may_evict(self, tag: Tag) -> bool:
        """Whether a snapshot is one that may go, and nobody needs it now."""
        shelf = self.catalog.shelf
        found = shelf.known.get(tag)
        return (
            found is not None
            and found.cached
            and not shelf.is_locked(tag)
            and tag not in shelf.writing
            and not shelf.dependents(tag)
            and not self.catalog.users([tag])
            and not self.zygotes.in_use(tag)
        )

    async def drop_unused_images(self) -> None:
        """Remove the images that no snapshot needs, unless one may be on its way.

        What cannot be removed is logged, and stays until the next time.
        """
        try:
            for aside in [self.store.put_aside(path) for path in self._unused_images()]:
                await asyncio.to_thread(self.store.discard, aside)
        except ForkdError as error:
            log.warning("image not removed", extra={"error": str(error)})

    def _check_unused(self, caller: Caller, tags: Iterable[Tag]) -> None:
        """Return if nothing uses any of `tags`.

        Raises:
            Conflict: Something does.
        """
        for tag in tags:
            snapshot = self.catalog.get(tag)
            self.catalog.shelf.check_unlocked(tag)
            users = self.catalog.users_named(caller, [tag])
            if users:
                raise Conflict(f"snapshot {tag} is in use by {users}", tag=tag)
            if snapshot.status is SnapshotStatus.WRITING:
                raise Conflict(f"snapshot {tag} is being written", tag=tag)
            if self.zygotes.in_use(tag):
                raise Conflict(f"snapshot {tag} is being forked", tag=tag)

    async def _remove(self, tag: Tag) -> None:
        """Remove one snapshot, or the record of one that failed; its tag is locked.

        Its owner is forgotten while the tag is still taken, and after its files: whose a snapshot
        is must be known as long as there is one, and the tag's next snapshot has its own owner.
        """
        try:
            # If there is a record there is no snapshot, and the other way round.
            await asyncio.to_thread(self.pending.remove, tag)
            await asyncio.to_thread(self.store.delete, tag)
        except ForkdError as error:
            about = {**error.context, "tag": tag}
            raise type(error)(f"cannot remove snapshot {tag}: {error}", **about) from error
        try:
            await self.records.remove_snapshot_owners([tag])
        except ForkdError as error:  # the tag's next owner takes its place
            log.warning("owner not forgotten", extra={"tag": tag, "error": str(error)})
        self.catalog.forget(tag)
        log.info("snapshot deleted", extra={"tag": tag})
        await self.zygotes.stop_or_log(tag)

    async def _tidy_snapshots(self, *, dry_run: bool) -> list[Removed]:
        """Remove orphans and records of failures.

        Each removal takes a while, so each is looked at again right before its own.
        """
        orphans, failed = self._orphans(), tuple(self.catalog.shelf.failed.values())
        removed = []
        for kind, snapshot in [
            *(("snapshot", each) for each in orphans),
            *(("failed", each) for each in failed),
        ]:
            if not dry_run:
                if not self._is_lost(snapshot):
                    continue
                with self.catalog.shelf.locked([snapshot.tag], "being removed"):
                    await to_end(self._remove(snapshot.tag))
            removed.append(Removed(kind, snapshot.tag, snapshot.stored_bytes))
        return removed

    def _orphans(self) -> list[Snapshot]:
        """Return the snapshots whose chain lacks a link, each after all that depend on it."""
        shelf = self.catalog.shelf
        lost = filter(self._is_lost, shelf.known.values())
        return sorted(lost, key=lambda each: len(shelf.ancestors(each)), reverse=True)

    def _is_lost(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot is still on the shelf, of no use to anybody, and in nobody's hands."""
        shelf, tag = self.catalog.shelf, snapshot.tag
        if shelf.is_locked(tag):
            return False
        if shelf.failed.get(tag) is snapshot:
            return True
        return (
            shelf.known.get(tag) is snapshot
            and _lacks_link(snapshot, shelf.known)
            and not self.catalog.users([tag])
            and not self.zygotes.in_use(tag)
        )

    async def _tidy_files(self, *, dry_run: bool) -> list[Removed]:
        """Remove leftovers in the store."""
        store = self.store
        found = [("staging", path) for path in store.leftovers()]
        found += [("folder", path) for path in store.strangers()]
        found += [("image", path) for path in self._unused_images()]
        # Nothing comes between looking and putting aside, so nobody begins to use any of them.
        aside = [path if dry_run else store.put_aside(path) for _, path in found]
        removed = []
        for (kind, path), now in zip(found, aside, strict=True):
            size = await asyncio.to_thread(files.tree_bytes, now)
            if dry_run or await asyncio.to_thread(store.discard, now):
                removed.append(Removed(kind, path.name, size))
        return removed

    def _tidy_cache(self, *, dry_run: bool) -> list[Removed]:
        """Remove what machines were booted with before there was the agent of today; blocks."""
        removed = []
        try:
            unused = initramfs.unused(Cache.open(self.settings.cache_dir), self.settings.agent)
        except BuildError:
            return []  # without an agent, or a cache, there is none of today
        for path in unused:
            removed.append(Removed("initramfs", path.name, files.tree_bytes(path)))
            if not dry_run:
                files.remove_file(path)
        return removed

    def _unused_images(self) -> tuple[Path, ...]:
        used = self.catalog.shelf.image_keys()
        if self.catalog.shelf.writing or "" in used:
            return ()  # some may need an image that no manifest names, or none that is whole
        return self.store.unused_images(used)


def _lacks_link(snapshot: Snapshot, stored: dict[Tag, Snapshot]) -> bool:
    """Whether an ancestor of a snapshot is missing."""
    seen: set[Tag] = set()
    while snapshot.parent is not None and snapshot.tag not in seen:
        seen.add(snapshot.tag)
        above = stored.get(snapshot.parent)
        if above is None:
            return True
        snapshot = above
    return False
