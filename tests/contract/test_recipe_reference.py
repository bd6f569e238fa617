"""The reference of recipes names every key, and the recipes that come with forkd are sound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import limits
from forkd.images import recipe as recipes
from forkd.images.recipe import load_recipe

if TYPE_CHECKING:
    from pydantic import BaseModel

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference" / "recipe.md").read_text()

PARTS: list[type[BaseModel]] = [
    recipes.Recipe,
    recipes.ImageSource,
    recipes.DebianSource,
    recipes.RecipeFile,
    recipes.Pip,
    recipes.MachineShape,
    recipes.WarmUp,
    recipes.Ready,
]


@pytest.mark.parametrize("part", PARTS)
def test_every_key_of_a_recipe_is_in_the_reference(part: type[BaseModel]) -> None:
    keys = set(part.model_fields) - {"folder", "under"}

    assert {key for key in keys if key not in REFERENCE} == set()


@pytest.mark.parametrize(
    "limit",
    [
        recipes.FILES_MAX,
        recipes.PACKAGES_MAX,
        recipes.ENV_MAX,
        limits.VCPUS_MAX,
        limits.MEMORY_MIB_MIN,
        limits.MEMORY_MIB_MAX,
        limits.DISK_MIB_MAX,
        recipes.CMDLINE_BYTES_MAX,
        int(recipes.WARM_UP_S_MAX),
        limits.RUN_LINES_MAX,
    ],
)
def test_limits_are_in_the_reference_as_they_are_in_the_code(limit: int) -> None:
    assert f"{limit:,}" in REFERENCE


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*/recipe.toml")), ids=str)
def test_every_recipe_loads_is_named_like_its_folder_and_explained(path: Path) -> None:
    recipe = load_recipe(path)

    assert recipe.name == path.parent.name
    assert (path.parent / "README.md").is_file()
