"""Snapshots of images, made when they are first asked for, and kept as long as there is room.

A snapshot is found by what it would be made of: the image by its digest, what is changed of it, the
guest's kernel and agent, and whose it is.  So each is made once, however many ask at the same time,
and again after one of these has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from forkd.errors import ForkdError, QuotaExceeded
from forkd.host import files
from forkd.images import builder, inventory, kernel, keys, modules
from forkd.images.layout import Cache
from forkd.images.steps import Build
from forkd.model.caller import Scope
from forkd.model.ids import parse_tag
from forkd.model.progress import Progress
from forkd.model.recipe import NamedRecipe, RegistryImage, UploadedRecipe
from forkd.model.snapshot import CACHED_DIGITS, CACHED_PREFIX, SnapshotRequest, SnapshotStatus
from forkd.service.streams import progress_of
from forkd.service.supervision import TaskKind
from forkd.service.use_case import streaming_use_case

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from forkd.images.recipe import Recipe
    from forkd.model.caller import Caller, Tenant
    from forkd.model.ids import Tag
    from forkd.model.image import ImageSnapshotRequest
    from forkd.model.recipe import RecipeSource
    from forkd.model.snapshot import Snapshot
    from forkd.service.image_cache import ImageCache
    from forkd.service.images import Images, Shop
    from forkd.service.recipes import Recipes
    from forkd.service.settings import HostSettings
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.snapshots.component import Snapshots
    from forkd.service.supervision import Supervisor
    from forkd.store.snapshots import SnapshotStore
    from forkd.telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Wanted:
    """A snapshot of an image, by what it is made of.

    Attributes:
        tag: Its name.
        source: The image, by its digest if a registry has it.
    """

    tag: Tag
    source: RecipeSource


@dataclass(slots=True)
class Flight:
    """A snapshot that is being made; `ended` is set when it is not any more."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: ForkdError | None = None


class ImageSnapshots:
    """The snapshots of images of one host; `forkd.service.api_images` documents what it is asked.

    Args:
        recipes: What an image may be.
        images: Builds them.
        snapshots: Makes them.
        cache: Removes others to make room.
        catalog: Which there are.
        store: Notes when they were used.
        tasks: Has their making go on for those who wait for it.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what it works with
        self,
        telemetry: Telemetry,
        settings: HostSettings,
        tasks: Supervisor,
        recipes: Recipes,
        images: Images,
        snapshots: Snapshots,
        cache: ImageCache,
        catalog: Catalog,
        store: SnapshotStore,
    ) -> None:
        self.telemetry = telemetry
        self._settings = settings
        self._tasks = tasks
        self._recipes = recipes
        self._images = images
        self._snapshots = snapshots
        self._cache = cache
        self._catalog = catalog
        self._store = store
        self._flights: dict[Tag, Flight] = {}
        self._agent: tuple[float | None, str] = None, ""

    @streaming_use_case("snapshot_image", Scope.SNAPSHOTS)
    async def for_image(
        self, caller: Caller, request: ImageSnapshotRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Return a ready snapshot of an image, made unless there is one."""
        wanted = await asyncio.to_thread(self._known, caller.tenant, request)
        if wanted is None:

            async def look(tell: Callable[[Progress], None]) -> Wanted:
                work = partial(self._find, caller.tenant, request)
                return await self._images.work(caller, work, tell)

            steps = progress_of(self._tasks, TaskKind.BUILD, str(request.image), look)
            async with contextlib.aclosing(steps):
                async for step in steps:
                    if isinstance(step, Wanted):
                        wanted = step
                    else:
                        yield step
        assert wanted is not None  # noqa: S101 - the last step
        async with contextlib.aclosing(self._ready(caller, wanted, request)) as events:
            async for event in events:
                yield event

    async def _ready(
        self, caller: Caller, wanted: Wanted, request: ImageSnapshotRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Wait for a snapshot that is being made, or make it; the last event is the snapshot."""
        tag = wanted.tag
        while (found := await self._use(caller, tag)) is None:
            flight = self._flights.get(tag)
            if flight is None:
                flight = self._flights[tag] = Flight()
                try:
                    async with contextlib.aclosing(self._make(caller, wanted, request)) as steps:
                        async for step in steps:
                            yield step
                except ForkdError as error:
                    flight.error = error
                    raise
                finally:
                    self._flights.pop(tag)
                    flight.ended.set()
                continue
            yield Progress("wait", None, "waiting for another request that makes this snapshot")
            await flight.ended.wait()
            if (failed := flight.error) is not None:
                raise type(failed)(str(failed), **failed.context)
        yield found

    async def _make(
        self, caller: Caller, wanted: Wanted, request: ImageSnapshotRequest
    ) -> AsyncGenerator[Progress, None]:
        asked = SnapshotRequest(wanted.tag, wanted.source, request.changes, cached=True)
        while True:
            try:
                async with contextlib.aclosing(self._snapshots.bake(caller, asked)) as steps:
                    async for step in steps:
                        if isinstance(step, Progress):
                            yield step
            except QuotaExceeded as error:
                await self._cache.make_room(caller.tenant, error)
            else:
                self._cache.trim_soon()
                return

    async def _use(self, caller: Caller, tag: Tag) -> Snapshot | None:
        """Return a snapshot that is ready, used from now on; None if it is to be made."""
        async with self._cache.changing:
            found = self._catalog.shelf.known.get(tag)
            if found is None or self._catalog.shelf.is_locked(tag):
                return None
            if found.status is SnapshotStatus.READY:
                await asyncio.to_thread(self._store.touch_cached, tag)
                return self._catalog.get(tag)
        await self._snapshots.delete(caller, tag)  # it is damaged
        return None

    # In a thread

    def _known(self, tenant: Tenant, request: ImageSnapshotRequest) -> Wanted | None:
        """Return what is wanted if that is known without a registry and a build; blocks."""
        if request.pull:
            return None
        cache = Cache.open(self._settings.cache_dir)
        source = self._recipes.chosen(request.image)
        if isinstance(source, RegistryImage) and source.reference.digest is None:
            digest = inventory.digest_of(cache, str(source.reference))
            if digest is None:
                return None
            source = replace(source, reference=source.reference.pinned(digest))
        recipe = self._recipes.read(source, request.changes)
        named = recipe.machine.kernel
        if kernel.is_debian(named) and not kernel.newest_cached(cache, kernel.series_of(named)):
            return None  # it is to be fetched
        wanted, image_key = self._identify(tenant, source, recipe, cache, Build())
        at_hand = (self._store.folder(wanted.tag), cache.images / image_key)
        return wanted if any(map(files.is_there, at_hand)) else None

    def _find(self, tenant: Tenant, request: ImageSnapshotRequest, shop: Shop) -> Wanted:
        """Return what is wanted, after its registry was asked; blocks."""
        source = shop.pinned(self._recipes.chosen(request.image))
        recipe = self._recipes.read(source, request.changes)
        return self._identify(tenant, source, recipe, shop.cache, shop.build)[0]

    def _identify(
        self, tenant: Tenant, source: RecipeSource, recipe: Recipe, cache: Cache, build: Build
    ) -> tuple[Wanted, str]:
        """Return what a recipe's snapshot is called, and its image."""
        chosen = builder.kernel_of(recipe, cache, build)
        planned = modules.choose(chosen, recipe.image.wanted_modules)
        image_key = keys.image_key(recipe, planned)
        said = {
            "image": image_key,
            "recipe": _said(recipe),
            "kernel": chosen.version if chosen.modules else keys.file_digest(chosen.vmlinuz),
            "agent": self._agent_digest(),
            "tenant": tenant,
        }
        if recipe.under is not None:
            said["under"] = _said(recipe.under)
        if isinstance(source, UploadedRecipe | NamedRecipe):
            said["source"] = str(source)
        text = json.dumps(said, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()[:CACHED_DIGITS]
        return Wanted(parse_tag(f"{CACHED_PREFIX}{digest}"), source), image_key

    def _agent_digest(self) -> str:
        agent: Path = self._settings.agent
        changed_at_s, digest = self._agent
        if not digest or changed_at_s != files.changed_at_s(agent):
            changed_at_s, digest = files.changed_at_s(agent), keys.file_digest(agent)
            self._agent = changed_at_s, digest
        return digest


def _said(recipe: Recipe) -> dict[str, object]:
    """Return what a recipe says that makes a difference to its snapshot."""
    return recipe.model_dump(mode="json", exclude={"folder", "description", "under"})
