"""How a caller names a recipe, and what it may learn of one that it uploaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest, NotFound
from forkd.limits import RECIPE_NAME_PATTERN
from forkd.model.listing import some

if TYPE_CHECKING:
    from collections.abc import Iterable

UPLOADED = "sha256:"
"""Begins the reference to an uploaded recipe; the digest of its archive follows."""

NAMES_SHOWN_MAX = 50
"""Most names of recipes that an error lists."""

_NAME = re.compile(RECIPE_NAME_PATTERN.removesuffix("$"))
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class NamedRecipe:
    """A recipe in one of the operator's folders, by the name of its own folder."""

    name: str


@dataclass(frozen=True, slots=True)
class UploadedRecipe:
    """A recipe that was uploaded.

    Attributes:
        digest: SHA-256 of its archive, lower-case hex.
    """

    digest: str

    def __str__(self) -> str:
        return f"{UPLOADED}{self.digest}"


RecipeSource = NamedRecipe | UploadedRecipe | Path
"""A recipe, as a caller names it; a path is absolute, and on the daemon's host."""


@dataclass(frozen=True, slots=True)
class StoredRecipe:
    """An uploaded recipe.

    Attributes:
        source: What names it in a request.
        name: What it calls itself.
        bytes: What it takes in the store.
    """

    source: UploadedRecipe
    name: str
    bytes: int


def parse_recipe_source(text: str, *, field: str = "recipe") -> RecipeSource:
    """Return what `text` names: a recipe by name, by path, or by what an upload answered.

    Raises:
        InvalidRequest: It is none of these; `context["field"]` is `field`.
    """
    if text.startswith(UPLOADED):
        return parse_uploaded(text, field=field)
    if text.startswith("/") and "\0" not in text:
        return Path(text)
    if _NAME.fullmatch(text):
        return NamedRecipe(text)
    raise InvalidRequest(
        f"{field} must be a recipe's name, an absolute path in a folder of recipes, or what an "
        f"upload answered: {text[:80]!r}",
        field=field,
    )


def parse_uploaded(text: str, *, field: str = "recipe") -> UploadedRecipe:
    """Return the uploaded recipe that `text` refers to.

    Raises:
        InvalidRequest: It is no reference to one; `context["field"]` is `field`.
    """
    digest = text.removeprefix(UPLOADED)
    if not text.startswith(UPLOADED) or _DIGEST.fullmatch(digest) is None:
        raise InvalidRequest(
            f"{field} is no reference to an uploaded recipe ({UPLOADED} and 64 hex digits): "
            f"{text[:80]!r}",
            field=field,
        )
    return UploadedRecipe(digest)


def no_recipe(name: str, known: Iterable[str]) -> NotFound:
    """Return the error for a name that no recipe has; it lists those that there are."""
    names = sorted(set(known))
    there_are = some(names, NAMES_SHOWN_MAX) or "none"
    return NotFound(f"no recipe {name!r}; there are: {there_are}", recipe=name)


def no_upload(recipe: UploadedRecipe) -> NotFound:
    """Return the error for an uploaded recipe that is not there."""
    return NotFound(
        f"no uploaded recipe {recipe}: upload it again, those that no build uses are removed",
        recipe=str(recipe),
    )
