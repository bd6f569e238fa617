"""Bake a recipe over its base: in a fork of the base's snapshot, as a link over it.

    snapshot of the base -> what is added to its image -> fork -> add -> warm -> quiesce -> write

The base's snapshot is one without a name, made once for all recipes over it (`image_snapshots`); it
stays for as long as a link depends on it.  The link has the pages and blocks that the recipe has
changed, and everything else is the base's, on disk and in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from forkd.engine import guest_bake, guest_files
from forkd.errors import BuildError, Conflict, EngineError, GuestError, InvalidRequest, StoreError
from forkd.host import files
from forkd.images.plan import ImageConfig as Settings
from forkd.model.caller import Scope
from forkd.model.image import ImageSnapshotRequest
from forkd.model.progress import Progress
from forkd.model.recipe import RecipeChanges
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import BuiltLink, Snapshot
from forkd.service.snapshots.bake_warm import warm_up
from forkd.service.streams import progress_of
from forkd.service.supervision import TaskKind, to_end

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable
    from pathlib import Path

    from forkd.engine.guest import Guest
    from forkd.images.builder import Additions
    from forkd.images.recipe import Recipe
    from forkd.model.caller import Caller
    from forkd.model.ids import SandboxId
    from forkd.model.snapshot import SnapshotRequest
    from forkd.service.image_snapshots import ImageSnapshots
    from forkd.service.images import Images
    from forkd.service.recipes import Recipes
    from forkd.service.sandboxes.component import Sandboxes
    from forkd.service.settings import HostSettings
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.supervision import Supervisor
    from forkd.service.trees.branches import Branches
    from forkd.store.snapshots import SnapshotStore

    Tell = Callable[[Progress], None]

READ_BYTES = 1024 * 1024
"""How much of what is added is read at once."""


class OverBase:
    """Bakes the recipes of one host that have a base.

    Args:
        recipes: Which recipe is whose base.
        images: Builds what is added to the base's image.
        catalog: Which snapshots there are.
        sandboxes: Forks the base's snapshot.
        branches: Writes the fork down.
        store: Has the root file systems of snapshots.

    Attributes:
        image_snapshots: Has, or makes, the base's snapshot; set before anything is baked.
    """

    image_snapshots: ImageSnapshots

    def __init__(  # noqa: PLR0913, PLR0917 - what it works with
        self,
        settings: HostSettings,
        tasks: Supervisor,
        recipes: Recipes,
        images: Images,
        catalog: Catalog,
        sandboxes: Sandboxes,
        branches: Branches,
        store: SnapshotStore,
    ) -> None:
        self._settings = settings
        self._tasks = tasks
        self._recipes = recipes
        self._images = images
        self._catalog = catalog
        self._sandboxes = sandboxes
        self._branches = branches
        self._store = store

    async def bake(
        self, caller: Caller, request: SnapshotRequest, recipe: Recipe
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Bake a recipe in a fork of its base's snapshot; the last event is the snapshot."""
        self._catalog.check_claim(request.tag, cached=request.cached)
        base: Snapshot | None = None
        wanted = ImageSnapshotRequest(self._recipes.base_of(recipe), RecipeChanges())
        events = self.image_snapshots.for_image(caller, wanted)
        async with contextlib.aclosing(events) as steps:
            async for step in steps:
                if isinstance(step, Snapshot):
                    base = step
                else:
                    yield step
        assert base is not None  # noqa: S101 - the last event
        under = base

        async def work(tell: Tell) -> Snapshot:
            return await self._bake(caller, request, recipe, under, tell)

        async with contextlib.aclosing(
            progress_of(self._tasks, TaskKind.BAKE, request.tag, work)
        ) as steps:
            async for step in steps:
                yield step

    async def _bake(
        self,
        caller: Caller,
        request: SnapshotRequest,
        recipe: Recipe,
        base: Snapshot,
        tell: Tell,
    ) -> Snapshot:
        rootfs = self._store.rootfs(base.image_key)
        added = await self._images.additions(caller, recipe, rootfs, _settings_of(base), tell)
        config = added.config.for_programs()
        config.check()
        self._catalog.check_claim(request.tag, base.tag, cached=request.cached)
        tell(Progress("fork", None, f"forking {base.tag}, the base"))
        forker = replace(caller, scopes=caller.scopes | {Scope.RUN})  # it is baked, as any machine
        options = ForkOptions(all_or_nothing=True, die_with_daemon=True)
        (fork,) = (await self._sandboxes.fork(forker, base.tag, 1, options)).sandboxes
        try:
            runtime = await self._warm(forker, fork.id, recipe, added, tell)
            tell(Progress("save", None, f"writing what differs from {base.tag}"))
            built = BuiltLink(None, config, request.cached, recipe.name, runtime)
            return await self._branches.write_built(forker, fork.id, request.tag, built)
        finally:
            await to_end(self._sandboxes.delete_all([fork.id]))

    async def _warm(
        self, caller: Caller, sandbox: SandboxId, recipe: Recipe, added: Additions, tell: Tell
    ) -> str:
        """Have a fork of the base become what the recipe says; return its runtime, or `none`.

        Raises:
            WarmUpError: The warm-up failed, or was not ready in time.
            BuildError: A line to run failed, or something could not be added.
        """
        guest = self._sandboxes.roster.get(caller, sandbox).running_guest()
        try:
            tell(Progress("add", None, f"adding what {recipe.name} has beside its base"))
            await put_in(guest, added)
            runtime = await warm_up(guest, recipe, added.config, tell)
            tell(Progress("quiesce", None, "making the guest cheap to fork"))
            await guest_bake.quiesce(guest)
        except (GuestError, Conflict, InvalidRequest) as error:
            raise BuildError(f"the guest refused to be baked: {error}", **error.context) from error
        except EngineError as error:
            raise BuildError(f"{recipe.name} could not be baked: {error}") from error
        await asyncio.sleep(self._settings.settle_s)
        return runtime


async def put_in(guest: Guest, added: Additions) -> None:
    """Put what a recipe adds into a guest.

    Raises:
        BuildError: Some of it could not be made.
    """
    for each in added.replaced:
        await guest_files.remove(guest, f"/{each}", recursive=True)
    made = await guest_files.write_archive(
        guest, "/", _pieces(added.archive), user=None, keep_owner=True
    )
    if made.skipped:
        path, reason = made.skipped[0]
        more = len(made.skipped) - 1 + made.more_skipped
        others = f", nor {more} others" if more else ""
        raise BuildError(f"/{path} could not be made: {reason}{others}", path=path)


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with files.opened(path) as file:
        while piece := await asyncio.to_thread(file.read, READ_BYTES):
            yield piece


def _settings_of(base: Snapshot) -> Settings:
    """Return what the image of a base says of programs.

    Raises:
        StoreError: That is not known.
    """
    said = base.config
    if said is None:
        raise StoreError(f"snapshot {base.tag} does not say what its image says of programs")
    return Settings(
        env=said.env,
        cwd=said.cwd,
        user=said.user,
        post_fork_command=(),
        entrypoint=said.entrypoint,
        cmd=said.cmd,
    )
