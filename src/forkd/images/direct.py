"""Recipes that no file says: an image of a registry, and what a request changes of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.images.recipe import Ready, parse_recipe

if TYPE_CHECKING:
    from forkd.images.recipe import Recipe
    from forkd.model.recipe import RecipeChanges
    from forkd.model.reference import ImageReference

NOWHERE = Path("/")
"""The folder of a recipe that has no files."""


def recipe_of(reference: ImageReference) -> Recipe:
    """Return the recipe of an image as it is: its own Python is the warm runtime, if it has one."""
    table = {
        "name": reference.recipe_name,
        "description": f"The image {reference}",
        "image": {"oci": f"docker://{reference}"},
        "warmup": {"runtime": "auto"},
    }
    return parse_recipe(table, folder=NOWHERE)


def changed(recipe: Recipe, changes: RecipeChanges) -> Recipe:
    """Return a recipe with what a request changes of it.

    Raises:
        InvalidRequest: A finished root file system cannot have another size.
    """
    if changes.disk_mib is not None and recipe.image.rootfs is not None:
        raise InvalidRequest(
            f"disk_mib: the disk of {recipe.name} is a finished file system and keeps its size",
            field="disk_mib",
        )
    asked = {name: getattr(changes, name) for name in ("memory_mib", "vcpus", "disk_mib")}
    machine = {name: value for name, value in asked.items() if value is not None}
    warmup: dict[str, object] = {"run": (*recipe.warmup.run, *changes.run)}
    if changes.ready is not None:
        warmup["ready"] = Ready(command=("sh", "-c", changes.ready))
    return recipe.model_copy(
        update={
            "machine": recipe.machine.model_copy(update=machine),
            "warmup": recipe.warmup.model_copy(update=warmup),
        }
    )
