"""Find a recipe by what a person calls it."""

from __future__ import annotations

from pathlib import Path

import forkd
from forkd.errors import NotFound

FILE = "recipe.toml"


def find(name: str) -> Path:
    """Return the recipe called `name`: a TOML file, a folder that holds one, or a name of ours.

    Raises:
        NotFound: There is none; the message names those that there are.
    """
    for folder in (Path(), *_shelves()):
        path = (folder / name).absolute()
        if path.is_file() and path.suffix == ".toml":
            return path
        if (path / FILE).is_file():
            return path / FILE
    known = sorted({each.parent.name for shelf in _shelves() for each in shelf.glob(f"*/{FILE}")})
    there_are = f"; there are {', '.join(known)}" if known else ""
    raise NotFound(f"no recipe {name!r}: not a folder with a {FILE}{there_are}", field="recipe")


def _shelves() -> list[Path]:
    """Return where named recipes are: `recipes/` here, and beside the source of this package."""
    return [Path("recipes"), Path(forkd.__file__).resolve().parents[2] / "recipes"]
