"""Uploaded recipes: a folder for each, named by its contents, that is whole or absent.

    <state>/recipes/<digest>/       what was in the archive
    <state>/recipes/.owner-<digest> the tenant that has uploaded it first
    <state>/recipes/.partial-<…>/   one that is being received; removed at start

When a recipe was last used is when its folder was changed: nothing in it ever is.  Every method may
block.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from forkd.errors import CapacityError
from forkd.host import files
from forkd.limits import NAME_CHARS_MAX, RECIPES_UPLOADED_MAX
from forkd.model.caller import DEFAULT_TENANT, Tenant
from forkd.model.recipe import UploadedRecipe

if TYPE_CHECKING:
    from pathlib import Path

_PARTIAL, _OWNER = ".partial-", ".owner-"


class RecipeStore:
    """The uploaded recipes below one state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._recipes = state_dir / "recipes"

    def prepare(self) -> None:
        """Make the folder and remove what an earlier daemon left half-done."""
        files.make_folder(self._recipes, parents=True, exist_ok=True)
        for entry in files.entries(self._recipes):
            of = entry.name.removeprefix(_OWNER)
            orphan = of != entry.name and not files.is_there(self._recipes / of)
            if orphan or entry.name.startswith(_PARTIAL):
                files.remove_tree(entry)

    def holds(self, folder: Path) -> bool:
        """Whether a folder is one of an uploaded recipe."""
        return folder.is_relative_to(self._recipes)

    def aside(self) -> Path:
        """Return a folder to receive a recipe in; the caller makes and removes it."""
        return self._recipes / f"{_PARTIAL}{secrets.token_hex(8)}"

    def publish(self, folder: Path, recipe: UploadedRecipe, tenant: Tenant) -> bool:
        """Give a folder with all of a recipe its name, unless there is one already.

        Returns:
            Whether there was none, so that it is `tenant`'s from now on.

        Raises:
            CapacityError: There are as many as may be.
        """
        if files.is_there(self._folder(recipe)):
            return False
        if len(self._all()) >= RECIPES_UPLOADED_MAX:
            raise CapacityError(
                f"{RECIPES_UPLOADED_MAX} recipes are uploaded; `forkd snapshot gc` removes those "
                "that no build has used for long"
            )
        files.write_atomic(self._owner(recipe.digest), tenant.encode())
        files.publish(folder, self._folder(recipe))
        return True

    def owners(self) -> dict[UploadedRecipe, tuple[Tenant, int]]:
        """Return whose each recipe is, and what it takes on disk."""
        found = {}
        for folder in self._all():
            said = files.read(self._owner(folder.name), NAME_CHARS_MAX)
            tenant = DEFAULT_TENANT if said is None else Tenant(said.decode(errors="replace"))
            found[UploadedRecipe(folder.name)] = tenant, files.tree_bytes(folder)
        return found

    def used_at_s(self, recipe: UploadedRecipe) -> float | None:
        """Return when a recipe was last used; None if there is none."""
        return files.changed_at_s(self._folder(recipe))

    def put_aside(self, recipe: UploadedRecipe) -> Path:
        """Move a recipe out of the way in one step; the caller removes what it is now."""
        aside = self.aside()
        files.rename_if_there(self._folder(recipe), aside)
        files.remove_file(self._owner(recipe.digest))
        return aside

    def find(self, recipe: UploadedRecipe) -> Path | None:
        """Return the folder of a recipe, which is used now; None if there is none."""
        folder = self._folder(recipe)
        return folder if files.touch(folder) else None

    def unused(self, since_s: float) -> tuple[Path, ...]:
        """Return the folders of the recipes that nobody has used since then."""
        changed = ((each, files.changed_at_s(each)) for each in self._all())
        return tuple(each for each, at_s in changed if at_s is not None and at_s < since_s)

    def remove(self, recipe: UploadedRecipe) -> None:
        """Remove a recipe; one that is gone is fine."""
        files.remove_tree(self.put_aside(recipe))

    def _all(self) -> list[Path]:
        return [each for each in files.entries(self._recipes) if not each.name.startswith(".")]

    def _owner(self, digest: str) -> Path:
        return self._recipes / f"{_OWNER}{digest}"

    def _folder(self, recipe: UploadedRecipe) -> Path:
        return self._recipes / recipe.digest
