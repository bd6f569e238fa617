"""Bake, list and delete snapshots.

What is on disk is what there is; only those being written are remembered here.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.engine.configs import DiskConfig
from forkd.errors import CapacityError, Conflict, ForkdError, NotFound, StoreError
from forkd.host import proc
from forkd.model.ids import parse_tag
from forkd.model.limits import SNAPSHOTS_MAX
from forkd.model.progress import Progress
from forkd.model.snapshot import Snapshot, SnapshotStatus
from forkd.service import images
from forkd.service.bake import BakePlan, bake
from forkd.service.tasks import TaskOwner, to_end
from forkd.service.zygotes import ZygoteFiles
from forkd.store.manifest import Cpu, Manifest, StoredFile
from forkd.store.snapshots import LAYER_FILE, MEMORY_FILE, STATE_FILE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from forkd.engine.control import SavedFile
    from forkd.images.builder import BuiltImage
    from forkd.model.ids import Tag
    from forkd.model.snapshot import SnapshotRequest
    from forkd.service.settings import HostSettings
    from forkd.store.snapshots import SnapshotStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotTools:
    """What snapshots need of the rest of the service.

    Attributes:
        settings: Where things are.
        tasks: Who owns bakes.
        store: Where snapshots are.
        count_sandboxes: How many sandboxes of a tag are alive.
    """

    settings: HostSettings
    tasks: TaskOwner
    store: SnapshotStore
    count_sandboxes: Callable[[Tag], int]


class Snapshots:
    """The snapshots of one host."""

    def __init__(self, tools: SnapshotTools) -> None:
        self._tools = tools
        self._store = tools.store
        self._writing: dict[Tag, Snapshot] = {}
        self._loaded: dict[Tag, Snapshot] = {}

    async def start(self) -> None:
        """Read what is stored and remove images that no snapshot needs."""
        found = await asyncio.to_thread(lambda: [self._read(tag) for tag in self._store.tags()])
        self._loaded = {snapshot.tag: snapshot for snapshot in found}
        if all(snapshot.status is SnapshotStatus.READY for snapshot in found):
            await self._drop_unused_images()

    def list_all(self) -> tuple[Snapshot, ...]:
        """Return every snapshot, by tag, those being written included."""
        known = self._loaded | self._writing
        return tuple(self._with_count(known[tag]) for tag in sorted(known))

    def get(self, tag: Tag) -> Snapshot:
        """Return one snapshot.

        Raises:
            NotFound: There is none of that tag.
        """
        snapshot = self._writing.get(tag) or self._loaded.get(tag)
        if snapshot is None:
            raise NotFound(f"no snapshot {tag!r}", tag=tag)
        return self._with_count(snapshot)

    def get_ready(self, tag: Tag) -> Snapshot:
        """Return one snapshot that can be forked.

        Raises:
            NotFound: There is none of that tag.
            Conflict: It is being written.
            StoreError: It is damaged.
        """
        snapshot = self.get(tag)
        if snapshot.status is SnapshotStatus.WRITING:
            raise Conflict(f"snapshot {tag} is still being written", tag=tag)
        if snapshot.status is SnapshotStatus.FAILED:
            raise StoreError(f"snapshot {tag} cannot be used: {snapshot.error}", tag=tag)
        return snapshot

    def zygote_files(self, tag: Tag) -> ZygoteFiles:
        """Check a snapshot's files and say where they are; blocks.

        Raises:
            StoreError: One is missing, too new or damaged.
        """
        manifest = self._store.load(tag)
        folder = self._store.folder(tag)
        disk = None
        if manifest.disk_bytes:
            layers = (self._store.rootfs(manifest.image_key), folder / LAYER_FILE)
            disk = DiskConfig(layers, manifest.disk_bytes)
        return ZygoteFiles(folder / STATE_FILE, (folder / MEMORY_FILE,), disk)

    async def create(self, request: SnapshotRequest) -> AsyncGenerator[Progress | Snapshot, None]:
        """Bake a snapshot; see `forkd.service.api`."""
        self._claim(request)
        events: asyncio.Queue[Progress | None] = asyncio.Queue()
        task = None
        try:
            work = self._bake(request, events.put_nowait)
            task = self._tools.tasks.spawn(work, name=f"bake {request.tag}")
            task.add_done_callback(lambda _: events.put_nowait(None))
            while (event := await events.get()) is not None:
                yield event
            outcome = await task
        finally:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
            self._writing.pop(request.tag, None)
        if isinstance(outcome, ForkdError):
            raise outcome
        yield self._with_count(outcome)

    async def delete(self, tag: Tag, sandboxes: tuple[str, ...]) -> None:
        """Remove a snapshot; see `forkd.service.api`.

        Args:
            tag: The snapshot.
            sandboxes: The ids of those that were forked from it and live.

        Raises:
            NotFound: There is none of that tag.
            Conflict: It is being written, or something needs it.
        """
        snapshot = self.get(tag)
        if snapshot.status is SnapshotStatus.WRITING:
            raise Conflict(f"snapshot {tag} is being written", tag=tag)
        children = [other.tag for other in self._loaded.values() if other.parent == tag]
        if children:
            raise Conflict(f"snapshot {tag} is the parent of {_some(children)}", tag=tag)
        if sandboxes:
            raise Conflict(f"snapshot {tag} is in use by {_some(sandboxes)}", tag=tag)
        del self._loaded[tag]
        try:
            await asyncio.to_thread(self._store.delete, tag)
        except OSError as error:
            self._loaded[tag] = snapshot
            raise StoreError(f"cannot remove snapshot {tag}: {error}", tag=tag) from error
        log.info("snapshot deleted", extra={"tag": tag})
        await self._drop_unused_images()

    def _claim(self, request: SnapshotRequest) -> None:
        """Take the tag, so that nobody else bakes under it.

        Raises:
            Conflict: It is taken.
            CapacityError: There are too many snapshots.
        """
        tag = request.tag
        if tag in self._writing:
            raise Conflict(f"snapshot {tag} is being written already", tag=tag)
        if tag in self._loaded:
            raise Conflict(f"snapshot {tag} exists", tag=tag)
        if len(self._loaded) + len(self._writing) >= SNAPSHOTS_MAX:
            raise CapacityError(f"there are {SNAPSHOTS_MAX} snapshots already")
        self._writing[tag] = _placeholder(tag, self._store)

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
        self._loaded[request.tag] = snapshot
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
            created_at = self._writing[request.tag].created_at
            manifest = _manifest(request.tag, created_at, built, saved)
            await to_end(asyncio.to_thread(self._store.publish, staged, manifest))
            return await to_end(asyncio.to_thread(self._read, request.tag))
        finally:
            await to_end(asyncio.to_thread(self._store.discard, staged))

    async def _drop_unused_images(self) -> None:
        if self._writing:
            return  # a bake may stand on an image that no manifest names yet
        used = {snapshot.image_key for snapshot in self._loaded.values()}
        await asyncio.to_thread(self._store.drop_unused_images, used)

    def _read(self, tag: Tag) -> Snapshot:
        """Return what is stored under `tag`; a damaged snapshot is `failed`."""
        try:
            manifest = self._store.load(tag)
        except StoreError as error:
            log.warning("snapshot damaged", extra={"tag": tag, "error": str(error)})
            broken = _placeholder(tag, self._store)
            return replace(broken, status=SnapshotStatus.FAILED, error=str(error))
        return _from_manifest(tag, manifest, self._store)

    def _with_count(self, snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, sandboxes=self._tools.count_sandboxes(snapshot.tag))


_NAMED_MAX = 5


def _some(names: list[Tag] | tuple[str, ...]) -> str:
    """Return a few names and how many more there are."""
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _placeholder(tag: Tag, store: SnapshotStore) -> Snapshot:
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


def _from_manifest(tag: Tag, manifest: Manifest, store: SnapshotStore) -> Snapshot:
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
    )


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
