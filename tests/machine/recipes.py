"""A plugin of pytest that says which images the tests that were selected need.

`tests.machine.run` collects with it where the network is, and builds them.  A test bakes a recipe
if its module has the recipe's folder, or if it has its name as a parameter.  It runs the container
image if it asks for the fixture of that name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

LINE = "bakes: "
"""What a line begins with that names a recipe."""

CONTAINER = "runs the container image"
"""The line that is there if a test does."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Print a line for each recipe, and one for the container image."""
    for each in sorted({each.name for item in session.items for each in baked_by(item)}):
        print(f"{LINE}{each}")  # noqa: T201 - for whoever has started this
    if any(map(runs_container_image, session.items)):
        print(CONTAINER)  # noqa: T201 - as above


def baked_by(item: pytest.Item) -> set[Path]:
    """Return the recipes that a test may bake; those of every run are among them."""
    # A plugin that loads it before conftest.py does would keep pytest from rewriting its asserts.
    from tests.support.real_host import RECIPES, SOAK_RECIPES  # noqa: PLC0415

    module, call = getattr(item, "module", None), getattr(item, "callspec", None)
    known = [*vars(module).values(), *(call.params.values() if call else ())]
    named = {each if isinstance(each, str) else str(each) for each in known}
    return {each for each in SOAK_RECIPES if each in RECIPES or {each.name, str(each)} & named}


def runs_container_image(item: pytest.Item) -> bool:
    """Whether a test asks for the container image."""
    return "container_image" in getattr(item, "fixturenames", ())
