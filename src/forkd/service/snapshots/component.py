"""Bake, list, delete and tidy snapshots.

What is on disk is what there is; `forkd.service.registry` is the index.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.engine.configs import DiskConfig
from forkd.errors import BuildError, Conflict, ForkdError, InvalidRequest, StoreError
from forkd.host import files, proc
from forkd.images import initramfs
from forkd.images.layout import Cache
from forkd.model.ids import parse_tag
from forkd.model.progress import Progress
from forkd.model.snapshot import Removed, Snapshot, SnapshotStatus
from forkd.service import images
from forkd.service.bake import BakePlan, bake
from forkd.service.registry import some
from forkd.service.tasks import TaskOwner, to_end
from forkd.service.zygotes import ZygoteFiles
from forkd.store.manifest import Cpu, Manifest, StoredFile
from forkd.store.snapshots import LAYER_FILE, MEMORY_FILE, STATE_FILE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable
    from datetime import datetime
    from pathlib import Path

    from forkd.engine.replies import SavedFile
    from forkd.images.builder import BuiltImage
    from forkd.model.ids import Tag
    from forkd.model.snapshot import SnapshotRequest
    from forkd.service.registry import Registry
    from forkd.service.settings import HostSettings
    from forkd.service.zygotes import Chain, ZygotePool
    from forkd.store.pending import PendingStore
    from forkd.store.snapshots import SnapshotStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotTools:
    """What snapshots need of the rest of the service.

    Attributes:
        settings: Where things are.
        tasks: Who owns bakes.
        store: Where snapshots are.
        pending: Where it is remembered which are being written.
        registry: Which there are.
        zygotes: Those of snapshots in use.
    """

    settings: HostSettings
    tasks: TaskOwner
    store: SnapshotStore
    pending: PendingStore
    registry: Registry
    zygotes: ZygotePool


class Snapshots:
    """The snapshots of one host."""

    def __init__(self, tools: SnapshotTools) -> None:
        self._tools = tools
        self._store = tools.store
        self._registry = tools.registry

    async def start(self) -> None:
        """Read what is stored and remove images that no snapshot needs."""
        await self._registry.load()
        await self.drop_unused_images()

    async def adopt(self, tag: Tag) -> Snapshot:
        """Note a snapshot that somebody else has put into the store.

        Raises:
            StoreError: It, or something that it stands on, is missing or damaged.
        """
        snapshot = await asyncio.to_thread(self._registry.read, tag)
        self._registry.add(snapshot)
        return self._registry.get_ready(tag)

    def chain(self, tag: Tag) -> Chain:
        """Check the files of a snapshot and of all under it, and say where they are; blocks.

        Raises:
            StoreError: One is missing, too new or damaged.
            ChainError: One of an ancestor is, or that is not what the chain was made with.
        """
        links: list[ZygoteFiles] = []
        layers: list[Path] = []
        for manifest in self._store.load_chain(tag):
            link = parse_tag(manifest.tag)
            folder = self._store.folder(link)
            disk = None
            if manifest.disk_bytes:
                layers = layers or [self._store.rootfs(manifest.image_key)]
                layers.append(folder / LAYER_FILE)
                disk = DiskConfig(tuple(layers), manifest.disk_bytes)
            links.append(ZygoteFiles(link, folder / STATE_FILE, folder / MEMORY_FILE, disk))
        return tuple(links)

    async def create(self, request: SnapshotRequest) -> AsyncGenerator[Progress | Snapshot, None]:
        """Bake a snapshot; see `forkd.service.api`."""
        self._registry.claim(request.tag)
        made: Snapshot | None = None
        events: asyncio.Queue[Progress | None] = asyncio.Queue()
        task = None
        try:
            work = self._bake(request, events.put_nowait)
            task = self._tools.tasks.spawn(work, name=f"bake {request.tag}")
            task.add_done_callback(lambda _: events.put_nowait(None))
            while (event := await events.get()) is not None:
                yield event
            outcome = await task
            if isinstance(outcome, ForkdError):
                raise outcome
            made = outcome
        finally:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
                made = _baked(task)
            self._registry.settle(request.tag, made)
        yield self._registry.get(request.tag)

    # Removing

    async def delete(self, tag: Tag, *, cascade: bool = False, force: bool = False) -> None:
        """Remove a snapshot; see `forkd.service.api`.

        Args:
            tag: The snapshot.
            cascade: Remove all that stand on it as well; none if one of them is in use.
            force: Remove it from under those that stand on it, which cannot be used any more.

        Raises:
            NotFound: There is none of that tag.
            InvalidRequest: Both were asked for.
            Conflict: It, or what stands on it, is in use or being written; or something stands on
                it and neither was asked for.
        """
        if cascade and force:
            raise InvalidRequest("cascade and force exclude each other", field="force")
        standing = self._registry.descendants(tag)
        if self._registry.get(tag).status is SnapshotStatus.WRITING:
            raise Conflict(f"snapshot {tag} is being written", tag=tag)
        dependents = self._registry.dependents(tag)
        if dependents and not cascade and not force:
            raise Conflict(f"snapshot {tag} is the parent of {some(dependents)}", tag=tag)
        self._check_unused((*standing, tag))
        removed = (*standing, tag) if cascade else (tag,)
        self._registry.hold((*standing, tag), "being removed")
        try:
            for each in removed:
                await to_end(self._remove(each))
            for each in standing:
                await self._tools.zygotes.stop(each)
        finally:
            self._registry.release((*standing, tag))
        await self.drop_unused_images()

    def _check_unused(self, tags: Iterable[Tag]) -> None:
        """Return if nothing uses any of `tags`.

        Raises:
            Conflict: Something does.
        """
        for tag in tags:
            snapshot = self._registry.get(tag)
            self._registry.check_free(tag)
            users = self._registry.users([tag])
            if users:
                raise Conflict(f"snapshot {tag} is in use by {some(users)}", tag=tag)
            if snapshot.status is SnapshotStatus.WRITING:
                raise Conflict(f"snapshot {tag} is being written", tag=tag)
            if self._tools.zygotes.in_use(tag):
                raise Conflict(f"snapshot {tag} is being forked", tag=tag)

    async def _remove(self, tag: Tag) -> None:
        """Remove one snapshot, or the record of one that failed."""
        try:
            await asyncio.to_thread(self._store.delete, tag)
            await asyncio.to_thread(self._tools.pending.remove, tag)
        except OSError as error:
            raise StoreError(f"cannot remove snapshot {tag}: {error}", tag=tag) from error
        self._registry.forget(tag)
        await self._tools.zygotes.stop(tag)
        log.info("snapshot deleted", extra={"tag": tag})

    async def tidy(self, *, dry_run: bool = False) -> tuple[Removed, ...]:
        """Remove what nobody can use: leftovers, records of failures, orphans, idle images.

        Archives that machines with an earlier agent were booted from go as well.

        An orphan is a snapshot whose chain lacks a link; one whose chain is damaged stays, since
        the damage may be repaired.  What is in use stays as well.

        Args:
            dry_run: Only say what would be removed.

        Raises:
            StoreError: Something could not be removed.
        """
        orphans = self._orphans()
        removed = [Removed("snapshot", each.tag, each.stored_bytes) for each in orphans]
        removed += [Removed("failed", each.tag, 0) for each in self._registry.failed()]
        if not dry_run:
            for snapshot in (*orphans, *self._registry.failed()):
                await to_end(self._remove(snapshot.tag))
        try:
            removed += await to_end(self._tidy_files(dry_run=dry_run))
            removed += await to_end(asyncio.to_thread(self._tidy_cache, dry_run=dry_run))
        except OSError as error:
            raise StoreError(f"cannot remove {error.filename}: {error.strerror}") from error
        return tuple(removed)

    def _orphans(self) -> list[Snapshot]:
        """Return the snapshots whose chain lacks a link, each after all that stand on it."""
        stored = {each.tag: self._registry.get(each.tag) for each in self._registry.stored()}
        lost = [
            each
            for each in stored.values()
            if _lacks_link(each, stored)
            and not self._registry.users([each.tag])
            and not self._tools.zygotes.in_use(each.tag)
        ]
        return sorted(lost, key=lambda each: each.depth, reverse=True)

    async def _tidy_files(self, *, dry_run: bool) -> list[Removed]:
        """Remove what lies about in the store."""
        store = self._store
        found = [("staging", path) for path in store.leftovers()]
        found += [("folder", path) for path in store.strangers()]
        found += [("image", path) for path in self._unused_images()]
        # Nothing comes between looking and putting aside, so nobody begins to use any of them.
        aside = [path if dry_run else store.put_aside(path) for _, path in found]
        removed = []
        for (kind, path), now in zip(found, aside, strict=True):
            size = await asyncio.to_thread(files.tree_bytes, now)
            removed.append(Removed(kind, path.name, size))
            if not dry_run:
                await asyncio.to_thread(store.discard, now)
        return removed

    def _tidy_cache(self, *, dry_run: bool) -> list[Removed]:
        """Remove what machines were booted with before there was the agent of today; blocks."""
        settings = self._tools.settings
        removed = []
        try:
            unused = initramfs.unused(Cache.open(settings.cache_dir), settings.agent)
        except BuildError:
            return []  # without an agent, or a cache, there is none of today
        for path in unused:
            removed.append(Removed("initramfs", path.name, files.tree_bytes(path)))
            if not dry_run:
                path.unlink(missing_ok=True)
        return removed

    def _unused_images(self) -> tuple[Path, ...]:
        used = self._registry.image_keys()
        if self._registry.writing() or "" in used:
            return ()  # some may stand on an image that no manifest names, or none that is whole
        return self._store.unused_images(used)

    # Baking

    async def _bake(
        self, request: SnapshotRequest, tell: Callable[[Progress], None]
    ) -> Snapshot | ForkdError:
        """Bake and publish; returns the error that ended it, so that its reader raises it."""
        try:
            snapshot = await self._bake_staged(request, tell)
        except ForkdError as error:
            return error
        except OSError as error:
            return StoreError(f"cannot write snapshot {request.tag}: {error}", tag=request.tag)
        except asyncio.CancelledError:
            await to_end(asyncio.to_thread(self._store.delete, request.tag))
            raise
        log.info("snapshot ready", extra={"tag": request.tag})
        return snapshot

    async def _bake_staged(
        self, request: SnapshotRequest, tell: Callable[[Progress], None]
    ) -> Snapshot:
        staged = await asyncio.to_thread(self._store.stage)
        try:
            built = await images.build(self._tools.settings, request.recipe_path, tell)
            tell(Progress("image", None, f"keeping image {built.image.key}"))
            rootfs = await to_end(
                asyncio.to_thread(self._store.keep_rootfs, built.image.key, built.image.rootfs)
            )
            saved = await bake(self._tools.settings, BakePlan(built, rootfs, staged), tell)
            created_at = self._registry.get(request.tag).created_at
            manifest = _manifest(request.tag, created_at, built, saved)
            await to_end(asyncio.to_thread(self._store.publish, staged, manifest))
            return await to_end(asyncio.to_thread(self._registry.read, request.tag))
        finally:
            await to_end(asyncio.to_thread(self._store.discard, staged))

    async def drop_unused_images(self) -> None:
        """Remove the images that no snapshot stands on, unless one may be on its way."""
        for aside in [self._store.put_aside(path) for path in self._unused_images()]:
            await asyncio.to_thread(self._store.discard, aside)


def _baked(task: asyncio.Task[Snapshot | ForkdError]) -> Snapshot | None:
    """Return what a bake that has ended made, if it made something."""
    outcome = None if task.cancelled() or task.exception() else task.result()
    return None if isinstance(outcome, ForkdError) else outcome


def _lacks_link(snapshot: Snapshot, stored: dict[Tag, Snapshot]) -> bool:
    """Whether a snapshot stands, by however many others, on one that is not there."""
    seen: set[Tag] = set()
    while snapshot.parent is not None and snapshot.tag not in seen:
        seen.add(snapshot.tag)
        above = stored.get(snapshot.parent)
        if above is None:
            return True
        snapshot = above
    return False


def _manifest(
    tag: Tag, created_at: datetime, built: BuiltImage, saved: tuple[SavedFile, ...]
) -> Manifest:
    recipe, image, cpu = built.recipe, built.image, proc.cpu()
    return Manifest(
        tag=tag,
        created_at=created_at,
        recipe=recipe.name,
        image_key=image.key,
        kernel=built.kernel_version,
        vcpus=recipe.machine.vcpus,
        memory_bytes=recipe.machine.memory_mib << 20,
        disk_bytes=image.disk_bytes,
        runtime=recipe.warmup.runtime,
        cpu=Cpu(model=cpu.model, features=cpu.features),
        files=tuple(
            StoredFile.model_validate({"name": f.name, "bytes": f.bytes, "digest": f.digest})
            for f in saved
        ),
    )
