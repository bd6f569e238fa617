"""Build images, with progress; a build that nobody waits for is ended.

Builds take minutes and block, so they have threads of their own: database, forks and deletions
never wait behind them, or behind a lock that another builder holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from forkd.errors import ForkdError, QuotaExceeded
from forkd.host import files, threads
from forkd.host.process import Cancel
from forkd.images import builder, inventory
from forkd.images.layout import Cache
from forkd.images.resolving import resolve
from forkd.images.steps import Build
from forkd.limits import (
    BUILD_MEMORY_BYTES_MAX,
    BUILD_MEMORY_BYTES_MIN,
    BUILDS_MAX,
    LONG_RETRY_S,
)
from forkd.model.caller import Scope, Tenant
from forkd.model.recipe import RegistryImage
from forkd.model.tenant import Amounts
from forkd.service.ledger import either
from forkd.service.ledger import stored as stored_amounts
from forkd.service.places import Places
from forkd.service.streams import progress_of
from forkd.service.supervision import TaskKind, to_end
from forkd.service.use_case import streaming_use_case

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from pathlib import Path

    from forkd.host.cells import Cell
    from forkd.images.apart import Cells as BuildCells
    from forkd.images.builder import Additions, BuiltImage, Keep
    from forkd.images.inventory import StoredImage
    from forkd.images.plan import ImageConfig
    from forkd.images.recipe import Recipe
    from forkd.model.caller import Caller
    from forkd.model.image import Image
    from forkd.model.progress import Progress
    from forkd.model.recipe import RecipeChanges, RecipeSource
    from forkd.model.reference import ImageReference
    from forkd.service.admission import Admission
    from forkd.service.cells import Cells
    from forkd.service.ledger import Ledger
    from forkd.service.recipes import Recipes
    from forkd.service.settings import HostSettings
    from forkd.service.supervision import Supervisor
    from forkd.telemetry.telemetry import Telemetry

    Tell = Callable[[Progress], None]

T = TypeVar("T")

log = logging.getLogger(__name__)

IMAGE_KEPT_S = 600.0
"""How long an image, or a snapshot that was made of one for `run`, is kept after its last use at
least: whoever asked for it is about to use it."""

BUILDS_WAITING_MAX = 32
"""Most builds that wait for one of these to end; one more is refused."""


def _unknown() -> frozenset[str] | None:
    """Say that it is not known which images are needed."""
    return None


@dataclass(frozen=True, slots=True)
class Shop:
    """What a build works with, in its thread.

    Attributes:
        cache: Where images are.
        build: What tells how far it is.
        cells: Where what is somebody else's is handled; None for this very process.
    """

    cache: Cache
    build: Build
    cells: BuildCells | None

    def digest_now(self, reference: ImageReference) -> str:
        """Return the digest that a tag has now, and remember it.

        Raises:
            ForkdError: As `forkd.images.resolving.resolve`.
        """
        digest = resolve(str(reference), self.build, self.cells)
        inventory.remember(self.cache, str(reference), digest)
        return digest

    def pinned(self, source: RecipeSource) -> RecipeSource:
        """Return an image of a registry with the digest that its tag has now, as `digest_now`."""
        if not isinstance(source, RegistryImage) or source.reference.digest is not None:
            return source
        return replace(source, reference=source.reference.pinned(self.digest_now(source.reference)))


class Images:
    """The images of one host; `forkd.service.api.Images` documents what a caller may ask.

    Attributes:
        needed: Returns the keys of the images that snapshots need, as far as that is known.
        on_built: Called in the event loop's thread whenever an image was built.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what it works with
        self,
        telemetry: Telemetry,
        settings: HostSettings,
        tasks: Supervisor,
        recipes: Recipes,
        cells: Cells | None,
        ledger: Ledger,
        admission: Admission,
    ) -> None:
        self.telemetry = telemetry
        self._settings = settings
        self._tasks = tasks
        self._recipes = recipes
        self._cells = cells
        self._ledger = ledger
        self._admission = admission
        self.needed: Callable[[], frozenset[str] | None] = _unknown
        self.on_built: Callable[[], None] = _nothing
        self._owned: dict[str, Tenant] = {}
        ledger.make_room["snapshot_mib"] = either(
            ledger.make_room.get("snapshot_mib"), self._make_room
        )
        self._threads = threads.start(BUILDS_MAX, "forkd-build")
        self._wanted = Places("image builds", BUILDS_MAX + BUILDS_WAITING_MAX, LONG_RETRY_S)
        self._building = Places("image builds", BUILDS_MAX, LONG_RETRY_S)

    @property
    def running(self) -> int:
        """How many are being built, or found built, now."""
        return self._building.used

    @property
    def waiting(self) -> int:
        """How many wait for one of these to end."""
        return self._wanted.used - self.running

    async def __aenter__(self) -> Self:
        """Count every image for whoever has built it."""
        try:
            found = await self.stored()
        except ForkdError as error:  # builds will say so, too
            log.warning("image cache cannot be read", extra={"error": str(error)})
            found = ()
        for image in found:
            self._count(image)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the threads; builds have ended with the tasks that wanted them."""
        self._threads.shutdown()

    @streaming_use_case("build", Scope.SNAPSHOTS)
    async def build(
        self, caller: Caller, recipe: RecipeSource
    ) -> AsyncGenerator[Progress | Image, None]:
        """Build the image of a recipe."""
        self._admission.check(0)  # what it will take is not known before it begins

        async def work(tell: Callable[[Progress], None]) -> Image:
            return (await self.built(caller, recipe, tell)).image

        async for event in progress_of(self._tasks, TaskKind.BUILD, str(recipe), work):
            yield event

    async def recipe_of(self, source: RecipeSource, changes: RecipeChanges | None) -> Recipe:
        """Return a recipe, with what is to be otherwise in it; raises as `Recipes.read`."""

        def read() -> Recipe:
            return self._recipes.read(self._recipes.chosen(source), changes)

        return await asyncio.to_thread(read)

    async def built(
        self,
        caller: Caller,
        recipe: RecipeSource,
        tell: Callable[[Progress], None],
        changes: RecipeChanges | None = None,
        keep: Keep | None = None,
    ) -> BuiltImage:
        """Return the image of a recipe, built unless it is built already.

        Args:
            caller: Who wants it; what the build may take counts as the tenant's while it runs.
            recipe: Which one, as a caller names it.
            tell: Called in the event loop's thread with each step.
            changes: What is to be otherwise than in the recipe; None for nothing.
            keep: Keeps it beyond the cache, before anybody may remove it from there.

        Raises:
            CapacityError: As many builds wait as may.
            QuotaExceeded: The tenant may not have as much memory as a build is given.
            ForkdError: As `Recipes.read`, `resolve` and `forkd.images.builder.build`.
        """
        self._ledger.check(caller.tenant, stored_amounts(1))  # rather now than after the build
        settings = self._settings

        def work(shop: Shop) -> BuiltImage:
            pinned = shop.pinned(self._recipes.chosen(recipe))
            asked = self._recipes.read(pinned, changes)
            given = (shop.cache, settings.agent, shop.build, shop.cells, keep)
            return builder.build_recipe(asked, *given)

        made = await self.work(caller, work, tell)
        await self._charge(made.image.key)
        return made

    async def additions(
        self, caller: Caller, recipe: Recipe, base: Path, config: ImageConfig, tell: Tell
    ) -> Additions:
        """Return what a recipe adds to its base, built unless it is built already.

        Args:
            caller: Who wants it, as for `built`.
            recipe: A recipe over a base.
            base: The root file system of the base's snapshot.
            config: Settings of the base.
            tell: As for `built`.

        Raises:
            ForkdError: As `built`.
        """
        self._ledger.check(caller.tenant, stored_amounts(1))

        def work(shop: Shop) -> Additions:
            given = (shop.cache, shop.build, shop.cells)
            return builder.build_additions(recipe, base, config, *given)

        made = await self.work(caller, work, tell)
        await self._charge(made.key)
        return made

    async def work(
        self, caller: Caller, work: Callable[[Shop], T], tell: Callable[[Progress], None]
    ) -> T:
        """Do what a build does in a thread of the builds', as one of them; cancelling ends it.

        Raises:
            CapacityError: As many builds wait as may.
            ForkdError: Whatever `work` raises.
        """
        with self._wanted.take(caller):
            async with self._building.wait(caller):
                return await self._work(caller.tenant, work, tell)

    async def _work(
        self, tenant: Tenant, work: Callable[[Shop], T], tell: Callable[[Progress], None]
    ) -> T:
        loop = asyncio.get_running_loop()
        settings, cells = self._settings, self._cells

        def tell_from_thread(step: Progress) -> None:
            loop.call_soon_threadsafe(tell, step)

        def in_thread() -> T:
            build = Build(tell_from_thread, cancel, settings.registries, tenant)
            cell = None if cells is None else partial(self._cell, cells, tenant, loop)
            return work(Shop(Cache.open(settings.cache_dir), build, cell))

        with Cancel() as cancel:
            building = loop.run_in_executor(self._threads, in_thread)
            try:
                return await asyncio.shield(building)
            except asyncio.CancelledError:
                building.cancel()  # it never begins, if it has not begun
                cancel.set()
                await to_end(asyncio.wait([building]))
                if not building.cancelled():
                    building.exception()  # it says that it was cancelled, and we know
                raise

    async def stored(self) -> tuple[StoredImage, ...]:
        """Return the images in the cache, the one that was used longest ago first."""
        return await asyncio.to_thread(inventory.images_of, self._cache())

    async def remove(self, key: str, *, unused_since_s: float) -> bool:
        """Remove an image from the cache; return whether it was there, and used by nobody since."""
        cache = self._cache()
        remove = partial(inventory.remove_image, cache, key, unused_since_s=unused_since_s)
        removed = await to_end(asyncio.to_thread(remove))
        if removed:
            self._forget(key)
            log.info("image removed", extra={"image": key})
        return removed

    def _cache(self) -> Cache:
        return Cache.open(self._settings.cache_dir)

    async def _charge(self, key: str) -> None:
        """Count an image that was just built, or remove it if its tenant may not have so much."""
        if key in self._owned:
            return
        image = await asyncio.to_thread(inventory.image_of, self._cache(), key)
        if image is None:
            return
        tenant, amounts = Tenant(image.tenant), stored_amounts(image.stored_bytes)
        try:
            self._ledger.recount(_key(key), tenant, amounts)
        except QuotaExceeded:
            await self.remove(key, unused_since_s=time.time())
            raise
        self._owned[key] = tenant
        self.on_built()

    def _count(self, image: StoredImage) -> None:
        self._owned[image.key] = Tenant(image.tenant)
        amounts = stored_amounts(image.stored_bytes)
        self._ledger.count(_key(image.key), Tenant(image.tenant), amounts)

    def _forget(self, key: str) -> None:
        self._owned.pop(key, None)
        self._ledger.release(_key(key))

    def _make_room(self, tenant: Tenant) -> bool:
        """Remove the image of a tenant that no snapshot needs and that was used longest ago."""
        needed = self.needed()
        if needed is None or not any(owner == tenant for owner in self._owned.values()):
            return False
        unused_since_s = time.time() - IMAGE_KEPT_S
        for image in inventory.images_of(self._cache()):
            if self._owned.get(image.key) != tenant or image.key in needed:
                continue
            aside = inventory.put_aside(self._cache(), image.key, unused_since_s=unused_since_s)
            if aside is not None:
                self._forget(image.key)
                log.info("image removed to make room", extra={"image": image.key})
                remove = asyncio.to_thread(files.remove_tree, aside)
                self._tasks.run(TaskKind.DELETE, remove, image.key)
                return True
        return False

    @contextlib.contextmanager
    def _cell(
        self, cells: Cells, tenant: Tenant, loop: asyncio.AbstractEventLoop
    ) -> Iterator[Cell]:
        """Give a cell to a build that begins, in its thread.

        It has as much memory as a build may have, or as is left of its tenant's quota.
        """
        undo = contextlib.ExitStack()
        memory_mib = _in_loop(loop, lambda: self._reserve(tenant, undo))
        try:
            with cells.build(memory_mib << 20) as cell:
                yield cell
        finally:
            _in_loop(loop, undo.close)

    def _reserve(self, tenant: Tenant, undo: contextlib.ExitStack) -> int:
        """Reserve what a build may take until `undo` is closed; return its memory, in MiB."""
        self._admission.check(0)
        left_mib = self._ledger.memory_left_mib(tenant)
        most_mib, least_mib = BUILD_MEMORY_BYTES_MAX >> 20, BUILD_MEMORY_BYTES_MIN >> 20
        asked_mib = most_mib if left_mib is None else min(max(left_mib, least_mib), most_mib)
        undo.enter_context(self._ledger.reserve(tenant, Amounts(memory_mib=asked_mib)))
        return asked_mib


def _nothing() -> None:
    """Do nothing."""


def _key(image_key: str) -> str:
    """Return under what the ledger counts an image."""
    return f"image:{image_key}"


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Return what a call gives in the thread of the event loop; blocks another thread."""

    async def made() -> T:
        return call()

    return asyncio.run_coroutine_threadsafe(made(), loop).result()
