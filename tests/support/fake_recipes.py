"""Recipes of `fake_service`: `good`, `fails` and `hangs` in `/recipes`, and those uploaded."""

from __future__ import annotations

import hashlib
import io
import tarfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.model.caller import Scope
from forkd.model.recipe import (
    NamedRecipe,
    RecipeEntry,
    RegistryImage,
    StoredRecipe,
    UploadedRecipe,
    no_recipe,
    no_upload,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from forkd.model.caller import Caller
    from forkd.model.recipe import RecipeSource

FOLDER = Path("/recipes")

NAMES = ("fails", "good", "hangs")


class FakeRecipes:
    """Recipes in memory; `uploads` has each archive that came."""

    def __init__(self) -> None:
        self.uploads: list[bytes] = []
        self._stored: dict[UploadedRecipe, StoredRecipe] = {}

    async def upload(self, caller: Caller, pieces: AsyncIterable[bytes]) -> StoredRecipe:
        caller.require(Scope.SNAPSHOTS)
        data = b"".join([each async for each in pieces])
        self.uploads.append(data)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            file = tar.extractfile("recipe.toml")
            assert file is not None
            name = tomllib.loads(file.read().decode())["name"]
        made = StoredRecipe(UploadedRecipe(hashlib.sha256(data).hexdigest()), name, len(data))
        self._stored[made.source] = made
        return made

    async def get(self, caller: Caller, recipe: UploadedRecipe) -> StoredRecipe:
        caller.require(Scope.SNAPSHOTS)
        if recipe not in self._stored:
            raise no_upload(recipe)
        return self._stored[recipe]

    async def list(self, caller: Caller) -> tuple[RecipeEntry, ...]:
        caller.require(Scope.SNAPSHOTS)
        return tuple(RecipeEntry(name, f"One that {name}") for name in NAMES)

    async def name(self, caller: Caller, source: RecipeSource) -> str:
        """Return what a recipe calls itself."""
        if isinstance(source, UploadedRecipe):
            return (await self.get(caller, source)).name
        if isinstance(source, Path) and source.parent != FOLDER:
            raise InvalidRequest(f"{source} is in no folder of recipes ({FOLDER})", field="recipe")
        if isinstance(source, RegistryImage):
            return str(source)
        name = source.name
        if isinstance(source, NamedRecipe) and name not in NAMES:
            raise no_recipe(name, NAMES)
        return name
