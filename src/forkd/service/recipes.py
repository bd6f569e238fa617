"""Recipes: those in the operator's folders, and those that clients upload.

A recipe chooses what is read from this host's files into a guest, so a request may name only what
the operator has put into a folder of recipes.  Anything else is uploaded, as a tar archive, and may
use the files that came with it and no others.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from forkd.errors import CapacityError, ForkdError, InvalidRequest, QuotaExceeded
from forkd.host import archives, files
from forkd.images.bases import over_base
from forkd.images.direct import changed, recipe_of
from forkd.images.recipe import RECIPE_FILE_NAME, load_recipe
from forkd.limits import (
    RECIPE_ENTRIES_MAX,
    RECIPE_PATH_BYTES_MAX,
    RECIPE_UPLOAD_BYTES_MAX,
    ROOM_BYTES_MIN,
    SHORT_RETRY_S,
)
from forkd.model.caller import Scope
from forkd.model.recipe import (
    NamedRecipe,
    RecipeEntry,
    RegistryImage,
    StoredRecipe,
    UploadedRecipe,
    no_recipe,
    no_upload,
    parse_base,
)
from forkd.model.snapshot import Removed
from forkd.service.ledger import stored as stored_amounts
from forkd.service.places import Places
from forkd.service.supervision import TaskKind, to_end
from forkd.service.use_case import use_case

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncIterable, Callable

    from forkd.images.recipe import Recipe
    from forkd.model.caller import Caller, Tenant
    from forkd.model.recipe import RecipeChanges, RecipeSource
    from forkd.service.ledger import Ledger
    from forkd.service.supervision import Supervisor
    from forkd.service.workers import Workers
    from forkd.store.recipes import RecipeStore
    from forkd.telemetry.telemetry import Telemetry

UPLOADS_MAX = 8
"""Most recipes that are received at the same time."""

UNUSED_S_MAX = 7 * 24 * 3_600.0
"""How long an uploaded recipe that no build uses is kept: a week."""

RECIPES_LISTED_MAX = 10_000
"""Most of the operator's recipes that are listed."""

IN_USE_S_MAX = 6 * 3_600.0
"""How long an uploaded recipe may be in use since somebody has asked for it: a build, and the bake
that it is for.  It gives way to nothing before."""

LIMITS = archives.ArchiveLimits(RECIPE_ENTRIES_MAX, RECIPE_PATH_BYTES_MAX)

_ARCHIVE, _FOLDER = "archive.tar", "recipe"
"""What a recipe that is being received consists of."""

_WRITE_BYTES = 1024 * 1024
"""How much of an upload is written at once."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class _Run(Protocol):
    """Runs work that blocks in a thread of the workers', for one caller."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class FoundRecipe:
    """Where a recipe is.

    Attributes:
        path: Its folder, or its TOML file.
        confined: Whether it may use the files in its folder only.
    """

    path: Path
    confined: bool


class Recipes:
    """The recipes of one host; `forkd.service.api.Recipes` documents what a caller may ask.

    Args:
        folders: The operator's folders of recipes.
        store: Where uploaded ones are.
        workers: Receive and unpack them.
        ledger: What their tenants may have.
        tasks: Removes those that give way to others of their tenant.

    Attributes:
        uploads: The places of uploads.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what it works with
        self,
        telemetry: Telemetry,
        folders: tuple[Path, ...],
        store: RecipeStore,
        workers: Workers,
        ledger: Ledger,
        tasks: Supervisor,
    ) -> None:
        self.telemetry = telemetry
        self._folders = folders
        self._store = store
        self._workers = workers
        self._ledger = ledger
        self._tasks = tasks
        self._owners: dict[UploadedRecipe, Tenant] = {}
        ledger.make_room["snapshot_mib"] = self._make_room
        self.uploads = Places("recipe uploads", UPLOADS_MAX, SHORT_RETRY_S)

    async def load(self) -> None:
        """Count what is stored for whoever has uploaded it."""
        for recipe, (tenant, size_bytes) in (await asyncio.to_thread(self._store.owners)).items():
            self._owners[recipe] = tenant
            self._ledger.count(_key(recipe), tenant, stored_amounts(size_bytes))

    @use_case("upload_recipe", Scope.SNAPSHOTS)
    async def upload(self, caller: Caller, pieces: AsyncIterable[bytes]) -> StoredRecipe:
        """Take the archive of a recipe's folder; nothing is left of one that is refused."""
        with self.uploads.take(caller):
            aside = self._store.aside()
            run = partial(self._workers.run, caller)
            try:
                await run(partial(files.make_folder, aside))
                recipe, size_bytes = await self._receive(run, aside / _ARCHIVE, pieces)
                with self._ledger.reserve(caller.tenant, stored_amounts(size_bytes)):
                    fresh, stored = await run(partial(self._keep, aside, recipe, caller.tenant))
                if fresh:
                    await self._charge(run, caller.tenant, stored)
            finally:
                await to_end(run(partial(files.remove_tree, aside)))
        log.info("recipe uploaded", extra={"recipe": str(recipe), "recipe_name": stored.name})
        return stored

    @use_case("get_recipe", Scope.SNAPSHOTS)
    async def get(self, caller: Caller, recipe: UploadedRecipe) -> StoredRecipe:
        """Return an uploaded recipe, which is kept for another while."""
        return await self._workers.run(caller, partial(self._describe, recipe))

    @use_case("list_recipes", Scope.SNAPSHOTS)
    async def list(self, caller: Caller) -> tuple[RecipeEntry, ...]:
        """Return the operator's recipes, by name; of those of one name the one that is used."""
        return await self._workers.run(caller, self._entries)

    def _entries(self) -> tuple[RecipeEntry, ...]:
        names = sorted(self._names())
        return tuple(map(self._entry, names[:RECIPES_LISTED_MAX]))

    def _entry(self, name: str) -> RecipeEntry:
        """Return what a recipe says of itself."""
        try:
            recipe = self.read(NamedRecipe(name))
        except ForkdError as error:
            return RecipeEntry(name, "", str(error))
        return RecipeEntry(name, recipe.description, base=recipe.image.base)

    def chosen(self, source: RecipeSource) -> RecipeSource:
        """Return the operator's recipe that has the name of an image, which goes first; blocks."""
        if isinstance(source, RegistryImage) and source.name is not None:
            return source if self._look(source.name) is None else NamedRecipe(source.name)
        return source

    def read(self, source: RecipeSource, changes: RecipeChanges | None = None) -> Recipe:
        """Return a recipe, with what is to be otherwise; blocks.

        Raises:
            NotFound: There is none.
            InvalidRequest: It is a path outside of the operator's folders, or says what it may not.
        """
        if isinstance(source, RegistryImage):
            recipe = recipe_of(source.reference)
        else:
            recipe = self._load(source)
        if changes is not None:
            recipe = changed(recipe, changes)
        return over_base(recipe, self._base)

    def base_of(self, recipe: Recipe) -> UploadedRecipe | NamedRecipe | Path:
        """Return what a recipe names as its base.

        Raises:
            InvalidRequest: It names none, or none that may be a base.
        """
        source = parse_base(recipe.image.base or "", recipe.folder)
        if isinstance(source, RegistryImage):
            raise InvalidRequest("a base is a recipe", field="image.base")
        if isinstance(source, Path) and self._store.holds(recipe.folder):
            raise InvalidRequest(
                f"{recipe.name} is an uploaded recipe, so its base cannot be the folder "
                f"{recipe.image.base}: name a recipe of the daemon's, or an uploaded one",
                field="image.base",
            )
        return source

    def _base(self, recipe: Recipe, _: str) -> Recipe:
        return self._load(self.base_of(recipe))

    def _load(self, source: UploadedRecipe | NamedRecipe | Path) -> Recipe:
        where = self.find(source)
        return load_recipe(where.path, confined=where.confined)

    def find(self, source: UploadedRecipe | NamedRecipe | Path) -> FoundRecipe:
        """Return where a recipe is; blocks.

        Raises:
            NotFound: There is none.
            InvalidRequest: It is a path outside of the operator's folders.
        """
        if isinstance(source, UploadedRecipe):
            folder = self._store.find(source)
            if folder is None:
                raise no_upload(source)
            return FoundRecipe(folder, confined=True)
        if isinstance(source, NamedRecipe):
            return FoundRecipe(self._named(source.name), confined=False)
        return FoundRecipe(self._inside(source), confined=False)

    async def tidy(self, *, dry_run: bool = False) -> builtins.list[Removed]:
        """Remove uploaded recipes that no build has used for long."""
        unused = await asyncio.to_thread(self._store.unused, time.time() - UNUSED_S_MAX)
        removed = []
        for folder in unused:
            size_bytes = await asyncio.to_thread(files.tree_bytes, folder)
            removed.append(Removed("recipe", folder.name, size_bytes))
            if not dry_run:
                recipe = UploadedRecipe(folder.name)
                await asyncio.to_thread(self._store.remove, recipe)
                self._forget(recipe)
        return removed

    async def _charge(self, run: _Run, tenant: Tenant, stored: StoredRecipe) -> None:
        """Count a recipe that was kept, or remove it again if its tenant may not have so much."""
        try:
            self._ledger.recount(_key(stored.source), tenant, stored_amounts(stored.bytes))
        except QuotaExceeded:
            await run(partial(self._store.remove, stored.source))
            raise
        self._owners[stored.source] = tenant

    def _make_room(self, tenant: Tenant) -> bool:
        """Remove the recipe of a tenant that was used longest ago; return whether there was one."""
        oldest_s = time.time() - IN_USE_S_MAX
        mine = (each for each, owner in self._owners.items() if owner == tenant)
        used = [(self._store.used_at_s(each) or 0.0, each) for each in mine]
        at_s, recipe = min(used, key=lambda each: each[0], default=(oldest_s, None))
        if recipe is None or at_s >= oldest_s:
            return False
        aside = self._store.put_aside(recipe)
        self._forget(recipe)
        log.info("recipe removed to make room", extra={"recipe": str(recipe), "tenant": tenant})
        remove = asyncio.to_thread(files.remove_tree, aside)
        self._tasks.run(TaskKind.DELETE, remove, str(recipe))
        return True

    def _forget(self, recipe: UploadedRecipe) -> None:
        self._owners.pop(recipe, None)
        self._ledger.release(_key(recipe))

    async def _receive(
        self, run: _Run, archive: Path, pieces: AsyncIterable[bytes]
    ) -> tuple[UploadedRecipe, int]:
        """Write an archive; return what it is called by its contents, and how long it is."""
        free = await run(partial(files.free_bytes, archive.parent)) - ROOM_BYTES_MIN
        room = free // 2  # what is in the archive will lie beside it
        digest, waiting, size = hashlib.sha256(), bytearray(), 0
        async for piece in pieces:
            size += len(piece)
            if size > RECIPE_UPLOAD_BYTES_MAX:
                raise InvalidRequest(
                    f"the archive is longer than {RECIPE_UPLOAD_BYTES_MAX} bytes", field="body"
                )
            if size > room:
                raise CapacityError(f"no room for a recipe of {size} bytes; free space for it")
            digest.update(piece)
            waiting += piece
            if len(waiting) >= _WRITE_BYTES:
                await run(partial(files.append, archive, bytes(waiting)))
                waiting.clear()
        await run(partial(files.append, archive, bytes(waiting)))
        return UploadedRecipe(digest.hexdigest()), size

    def _keep(
        self, aside: Path, recipe: UploadedRecipe, tenant: Tenant
    ) -> tuple[bool, StoredRecipe]:
        """Unpack an archive that was received, unless it was before, and say so; blocks."""
        fresh = False
        if self._store.find(recipe) is None:
            folder = aside / _FOLDER
            files.make_folder(folder)
            archives.unpack(aside / _ARCHIVE, folder, LIMITS)
            if not files.is_there(folder / RECIPE_FILE_NAME):
                raise InvalidRequest(f"the archive holds no {RECIPE_FILE_NAME}", field="body")
            load_recipe(folder, confined=True)
            fresh = self._store.publish(folder, recipe, tenant)
        return fresh, self._describe(recipe)

    def _describe(self, recipe: UploadedRecipe) -> StoredRecipe:
        folder = self._store.find(recipe)
        if folder is None:
            raise no_upload(recipe)
        name = load_recipe(folder, confined=True).name
        return StoredRecipe(recipe, name, files.tree_bytes(folder))

    def _look(self, name: str) -> Path | None:
        """Return the operator's recipe of a name; None if there is none."""
        for folder in self._folders:
            if files.is_there(folder / name / RECIPE_FILE_NAME):
                return folder / name
        return None

    def _named(self, name: str) -> Path:
        if (found := self._look(name)) is not None:
            return found
        raise no_recipe(name, self._names())

    def _names(self) -> set[str]:
        present = (files.entries(each) for each in self._folders if files.is_folder(each))
        known = (each for entries in present for each in entries)
        return {each.name for each in known if files.is_there(each / RECIPE_FILE_NAME)}

    def _inside(self, path: Path) -> Path:
        real = files.real_path(path)
        if any(real.is_relative_to(files.real_path(folder)) for folder in self._folders):
            return real
        folders = ", ".join(map(str, self._folders)) or "none"
        raise InvalidRequest(
            f"{path} is in no folder of recipes ({folders}): upload the recipe, or have the "
            "operator add its folder to FORKD_RECIPE_DIRS",
            field="recipe",
        )


def _key(recipe: UploadedRecipe) -> str:
    """Return under what the ledger counts a recipe."""
    return f"recipe:{recipe.digest}"
