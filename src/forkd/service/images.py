"""Build images, with progress; a build that nobody waits for is ended.

Builds take minutes and block, so they have threads of their own: database, forks and deletions
never wait behind them, or behind a lock that another builder holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from forkd.host import threads
from forkd.host.process import Cancel
from forkd.images import builder
from forkd.images.layout import Cache
from forkd.images.resolving import resolve
from forkd.images.steps import Build
from forkd.limits import (
    BUILD_MEMORY_BYTES_MAX,
    BUILD_MEMORY_BYTES_MIN,
    BUILDS_MAX,
    LONG_RETRY_S,
)
from forkd.model.caller import Scope
from forkd.model.recipe import RegistryImage
from forkd.model.tenant import Amounts
from forkd.service.places import Places
from forkd.service.streams import progress_of
from forkd.service.supervision import TaskKind, to_end
from forkd.service.use_case import streaming_use_case

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from forkd.host.cells import Cell
    from forkd.images.apart import Cells as BuildCells
    from forkd.images.builder import BuiltImage
    from forkd.model.caller import Caller, Tenant
    from forkd.model.image import Image
    from forkd.model.progress import Progress
    from forkd.model.recipe import RecipeChanges, RecipeSource
    from forkd.service.admission import Admission
    from forkd.service.cells import Cells
    from forkd.service.ledger import Ledger
    from forkd.service.recipes import Recipes
    from forkd.service.settings import HostSettings
    from forkd.service.supervision import Supervisor
    from forkd.telemetry.telemetry import Telemetry

T = TypeVar("T")

BUILDS_WAITING_MAX = 32
"""Most builds that wait for one of these to end; one more is refused."""


class Images:
    """The images of one host; `forkd.service.api.Images` documents what a caller may ask."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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

    async def built(
        self,
        caller: Caller,
        recipe: RecipeSource,
        tell: Callable[[Progress], None],
        changes: RecipeChanges | None = None,
    ) -> BuiltImage:
        """Return the image of a recipe, built unless it is built already.

        Args:
            caller: Who wants it; what the build may take counts as the tenant's while it runs.
            recipe: Which one, as a caller names it.
            tell: Called in the event loop's thread with each step.
            changes: What is to be otherwise than in the recipe; None for nothing.

        Raises:
            CapacityError: As many builds wait as may.
            QuotaExceeded: The tenant may not have as much memory as a build is given.
            ForkdError: As `Recipes.read`, `resolve` and `forkd.images.builder.build`.
        """
        with self._wanted.take(caller):
            async with self._building.wait(caller):
                return await self._build(caller.tenant, recipe, changes, tell)

    async def _build(
        self,
        tenant: Tenant,
        source: RecipeSource,
        changes: RecipeChanges | None,
        tell: Callable[[Progress], None],
    ) -> BuiltImage:
        loop = asyncio.get_running_loop()
        settings, cells = self._settings, self._cells

        def tell_from_thread(step: Progress) -> None:
            loop.call_soon_threadsafe(tell, step)

        def work() -> BuiltImage:
            build = Build(tell_from_thread, cancel, settings.registries)
            cell = None if cells is None else partial(self._cell, cells, tenant, loop)
            pinned = _pinned(self._recipes.chosen(source), build, cell)
            recipe, cache = self._recipes.read(pinned, changes), Cache.open(settings.cache_dir)
            return builder.build_recipe(recipe, cache, settings.agent, build, cell)

        with Cancel() as cancel:
            building = loop.run_in_executor(self._threads, work)
            try:
                return await asyncio.shield(building)
            except asyncio.CancelledError:
                building.cancel()  # it never begins, if it has not begun
                cancel.set()
                await to_end(asyncio.wait([building]))
                if not building.cancelled():
                    building.exception()  # it says that it was cancelled, and we know
                raise

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


def _pinned(source: RecipeSource, build: Build, cells: BuildCells | None) -> RecipeSource:
    """Return an image of a registry with the digest that its tag has now; blocks."""
    if not isinstance(source, RegistryImage) or source.reference.digest is not None:
        return source
    digest = resolve(str(source.reference), build, cells)
    return replace(source, reference=source.reference.pinned(digest))


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Return what a call gives in the thread of the event loop; blocks another thread."""

    async def made() -> T:
        return call()

    return asyncio.run_coroutine_threadsafe(made(), loop).result()
