"""Bake, list, describe and remove snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from forkd.errors import ForkdError
from forkd.host import proc
from forkd.limits import BAKES_MAX, LONG_RETRY_S
from forkd.model.caller import Scope
from forkd.model.progress import Progress
from forkd.service.ledger import most_stored_bytes
from forkd.service.places import Places
from forkd.service.snapshots.bake import BakePlan, bake
from forkd.service.snapshots.disclosure import shown
from forkd.service.snapshots.stored import from_manifest
from forkd.service.snapshots.writing import config_of, store_error, stored_files
from forkd.service.staging import staged_folder
from forkd.service.streams import progress_of
from forkd.service.supervision import TaskKind, to_end
from forkd.service.use_case import streaming_use_case, use_case
from forkd.store.manifest import Cpu, Manifest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from datetime import datetime

    from forkd.images.builder import BuiltImage
    from forkd.images.recipe import Recipe
    from forkd.model.caller import Caller
    from forkd.model.ids import Tag
    from forkd.model.snapshot import Removed, Snapshot, SnapshotRequest
    from forkd.service.admission import Admission
    from forkd.service.images import Images
    from forkd.service.settings import HostSettings
    from forkd.service.snapshots.bake import Baked
    from forkd.service.snapshots.bake_leases import BakeLeases
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.snapshots.upkeep import Upkeep
    from forkd.service.supervision import Supervisor
    from forkd.store.snapshots import SnapshotStore
    from forkd.telemetry.telemetry import Telemetry

log = logging.getLogger(__name__)


class Over(Protocol):
    """Bakes recipes over their bases; `forkd.service.over_base` does."""

    def bake(
        self, caller: Caller, request: SnapshotRequest, recipe: Recipe
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Bake a recipe in a fork of its base's snapshot; raises as `Snapshots.bake`."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The snapshots of one host; `forkd.service.api.Snapshots` documents what a caller may ask.

    Attributes:
        leases: What the machines hold that are booted and warmed up for bakes.
        over: Bakes recipes that have a base.
        bakes: The places of bakes.
    """

    telemetry: Telemetry
    settings: HostSettings
    tasks: Supervisor
    admission: Admission
    store: SnapshotStore
    catalog: Catalog
    images: Images
    upkeep: Upkeep
    leases: BakeLeases
    over: Over
    bakes: Places = field(default_factory=lambda: Places("bakes", BAKES_MAX, LONG_RETRY_S))

    @streaming_use_case("bake", Scope.SNAPSHOTS)
    async def bake(
        self, caller: Caller, request: SnapshotRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Bake a snapshot."""
        self.admission.check(0)  # what its machine will have is not known before its recipe is read
        recipe = await self.images.recipe_of(request.recipe, request.changes)
        if recipe.under is not None:
            async with contextlib.aclosing(self.over.bake(caller, request, recipe)) as steps:
                async for step in steps:
                    yield step
            return
        with self.bakes.take(caller):
            async with contextlib.aclosing(self._baking(caller, request)) as steps:
                async for step in steps:
                    yield step

    async def _baking(
        self, caller: Caller, request: SnapshotRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        await self.catalog.claim(request.tag, caller.owner, cached=request.cached)
        made: Snapshot | None = None

        async def work(tell: Callable[[Progress], None]) -> None:
            nonlocal made
            made = await self._bake(caller, request, tell)

        try:
            steps = progress_of(self.tasks, TaskKind.BAKE, request.tag, work)
            async with contextlib.aclosing(steps):
                async for step in steps:
                    if step is not None:
                        yield step
        finally:
            self.catalog.settle(request.tag, made)
        yield self.catalog.get(request.tag)

    @use_case("list_snapshots", Scope.READ)
    async def list(self, caller: Caller) -> tuple[Snapshot, ...]:
        """Return every snapshot."""
        return tuple(shown(self.catalog, caller, each) for each in self.catalog.visible(caller))

    @use_case("get_snapshot", Scope.READ)
    async def get(self, caller: Caller, tag: Tag) -> Snapshot:
        """Return one snapshot."""
        return shown(self.catalog, caller, self.catalog.look_up(caller, tag))

    @use_case("share_snapshot", Scope.SNAPSHOTS)
    async def share(self, caller: Caller, tag: Tag, *, shared: bool) -> Snapshot:
        """Have every tenant use a snapshot, or only its own."""
        self.catalog.look_up_own(caller, tag)
        await self.catalog.share(tag, shared=shared)
        return self.catalog.get(tag)

    async def delete(
        self, caller: Caller, tag: Tag, *, cascade: bool = False, force: bool = False
    ) -> None:
        """Remove a snapshot."""
        await self.upkeep.delete(caller, tag, cascade=cascade, force=force)

    async def tidy(self, caller: Caller, *, dry_run: bool = False) -> tuple[Removed, ...]:
        """Remove what is unused."""
        return await self.upkeep.tidy(caller, dry_run=dry_run)

    async def _bake(
        self, caller: Caller, request: SnapshotRequest, tell: Callable[[Progress], None]
    ) -> Snapshot:
        """Bake and publish; of a bake that is cancelled nothing stays."""
        try:
            made = await self._bake_staged(caller, request, tell)
        except asyncio.CancelledError:
            await to_end(asyncio.to_thread(self.store.delete, request.tag))
            raise
        except ForkdError as error:
            raise store_error(request.tag, error) from error
        log.info("snapshot ready", extra={"tag": request.tag})
        return made

    async def _bake_staged(
        self, caller: Caller, request: SnapshotRequest, tell: Callable[[Progress], None]
    ) -> Snapshot:
        async with staged_folder(self.store) as staged:
            recipe = await self.images.recipe_of(request.recipe, request.changes)
            self.leases.check(caller, recipe)  # rather now than after the build
            built = await self.images.built(
                caller, request.recipe, tell, request.changes, self.store.keep_rootfs
            )
            built.config.for_programs().check()
            shape = _shape(self.catalog.get(request.tag), built)
            most_bytes = most_stored_bytes(shape, self.settings.disks.limit_mib)
            self.catalog.expect(request.tag, most_bytes)

            def waits() -> None:
                tell(Progress("boot", None, "waiting for other machines to be baked"))

            async with self.leases.take(caller, shape, waits) as lease:
                baked = await bake(
                    self.settings, BakePlan(built, built.image.rootfs, staged, lease), tell
                )
            self.catalog.expect(request.tag, sum(file.bytes for file in baked.files))
            created_at = self.catalog.get(request.tag).created_at
            manifest = _manifest(request.tag, created_at, built, baked)
            if request.cached:
                await asyncio.to_thread(self.store.mark_cached, staged)
            await to_end(asyncio.to_thread(self.store.publish, staged, manifest))
            return from_manifest(manifest, self.store, cached=request.cached)


def _shape(snapshot: Snapshot, built: BuiltImage) -> Snapshot:
    """Return a snapshot that is being baked, with what its machine has."""
    machine = built.recipe.machine
    return replace(
        snapshot,
        vcpus=machine.vcpus,
        memory_bytes=machine.memory_mib << 20,
        disk_bytes=built.image.disk_bytes,
    )


def _manifest(tag: Tag, created_at: datetime, built: BuiltImage, baked: Baked) -> Manifest:
    recipe, image, cpu = built.recipe, built.image, baked.cpu or proc.cpu()
    return Manifest(
        tag=tag,
        created_at=created_at,
        recipe=recipe.name,
        image_key=image.key,
        kernel=f"{built.kernel_version}@sha256:{built.kernel_digest}",
        vcpus=recipe.machine.vcpus,
        memory_bytes=recipe.machine.memory_mib << 20,
        disk_bytes=image.disk_bytes,
        runtime=baked.runtime,
        cpu=Cpu(model=cpu.model, features=cpu.features),
        files=stored_files(baked.files),
        config=config_of(built.config.for_programs()),
    )
