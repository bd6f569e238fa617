"""Uploaded recipes: a folder for each, named by its contents, that is whole or absent.

    <state>/recipes/<digest>/       what was in the archive
    <state>/recipes/.partial-<…>/   one that is being received; removed at start

When a recipe was last used is when its folder was changed: nothing in it ever is.  Every method may
block.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from forkd.errors import CapacityError
from forkd.host import files
from forkd.limits import RECIPES_UPLOADED_MAX

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.model.recipe import UploadedRecipe

_PARTIAL = ".partial-"


class RecipeStore:
    """The uploaded recipes below one state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._recipes = state_dir / "recipes"

    def prepare(self) -> None:
        """Make the folder and remove what an earlier daemon left half-done."""
        files.make_folder(self._recipes, parents=True, exist_ok=True)
        for entry in files.entries(self._recipes):
            if entry.name.startswith(_PARTIAL):
                files.remove_tree(entry)

    def aside(self) -> Path:
        """Return a folder to receive a recipe in; the caller makes and removes it."""
        return self._recipes / f"{_PARTIAL}{secrets.token_hex(8)}"

    def publish(self, folder: Path, recipe: UploadedRecipe) -> None:
        """Give a folder with all of a recipe its name, unless there is one already.

        Raises:
            CapacityError: There are as many as may be.
        """
        if files.is_there(self._folder(recipe)):
            return
        if len(self._all()) >= RECIPES_UPLOADED_MAX:
            raise CapacityError(
                f"{RECIPES_UPLOADED_MAX} recipes are uploaded; `forkd snapshot gc` removes those "
                "that no build has used for long"
            )
        files.publish(folder, self._folder(recipe))

    def find(self, recipe: UploadedRecipe) -> Path | None:
        """Return the folder of a recipe, which is used now; None if there is none."""
        folder = self._folder(recipe)
        return folder if files.touch(folder) else None

    def unused(self, since_s: float) -> tuple[Path, ...]:
        """Return the folders of the recipes that nobody has used since then."""
        changed = ((each, files.changed_at_s(each)) for each in self._all())
        return tuple(each for each, at_s in changed if at_s is not None and at_s < since_s)

    def remove(self, folder: Path) -> None:
        """Remove a recipe; one that is gone is fine."""
        aside = self.aside()
        files.rename_if_there(folder, aside)
        files.remove_tree(aside)

    def _all(self) -> list[Path]:
        return [each for each in files.entries(self._recipes) if not each.name.startswith(".")]

    def _folder(self, recipe: UploadedRecipe) -> Path:
        return self._recipes / recipe.digest
