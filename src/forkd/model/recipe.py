"""How a caller names a recipe, and what it may learn of one that it uploaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd import limits
from forkd.errors import InvalidRequest, NotFound
from forkd.limits import RECIPE_NAME_PATTERN
from forkd.model.checks import in_range
from forkd.model.listing import some
from forkd.model.reference import parse_reference

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forkd.model.reference import ImageReference

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


@dataclass(frozen=True, slots=True)
class RegistryImage:
    """An image of a registry, in the place of a recipe.

    Attributes:
        reference: Which.
        name: Its reference as it was given, if a recipe could have that name, which goes first.
    """

    reference: ImageReference
    name: str | None = None

    def __str__(self) -> str:
        return str(self.reference)


RecipeSource = NamedRecipe | UploadedRecipe | Path | RegistryImage
"""A recipe, as a caller names it; a path is absolute, and on the daemon's host."""


@dataclass(frozen=True, slots=True)
class RecipeChanges:
    """What a request says that is otherwise than in its recipe; None leaves it.

    Attributes:
        run: Shell lines that are run besides those of the recipe, after them.
        ready: A shell command that says with status 0 that the guest is ready.
        memory_mib: Memory of the machine.
        vcpus: Its virtual CPUs.
        disk_mib: Its disk.

    Raises:
        InvalidRequest: A value is out of range; the field is named.
    """

    run: tuple[str, ...] = ()
    ready: str | None = None
    memory_mib: int | None = None
    vcpus: int | None = None
    disk_mib: int | None = None

    def __post_init__(self) -> None:
        in_range("run, in lines,", len(self.run), 0, limits.RUN_LINES_MAX)
        for name, line in (*(("run", each) for each in self.run), ("ready", self.ready)):
            if line is not None:
                _check_line(name, line)
        if self.vcpus is not None:
            in_range("vcpus", self.vcpus, 1, limits.VCPUS_MAX)
        if self.disk_mib is not None:
            in_range("disk_mib", self.disk_mib, limits.DISK_MIB_MIN, limits.DISK_MIB_MAX)
        if self.memory_mib is not None:
            least, most = limits.MEMORY_MIB_MIN, limits.MEMORY_MIB_MAX
            in_range("memory_mib", self.memory_mib, least, most)
            if self.memory_mib % limits.MEMORY_MIB_STEP:
                raise InvalidRequest(
                    f"memory_mib must be a multiple of {limits.MEMORY_MIB_STEP}, not "
                    f"{self.memory_mib}",
                    field="memory_mib",
                )


def _check_line(field: str, line: str) -> None:
    if not line.strip() or "\0" in line:
        raise InvalidRequest(f"{field}: a line is empty, or holds a NUL", field=field)
    if len(line) > limits.RUN_LINE_CHARS_MAX:
        raise InvalidRequest(
            f"{field}: a line is longer than {limits.RUN_LINE_CHARS_MAX} characters", field=field
        )


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


@dataclass(frozen=True, slots=True)
class RecipeEntry:
    """A recipe in one of the operator's folders.

    Attributes:
        name: What a request names it by.
        description: What it says of itself.
        error: Why it cannot be used; None if it can.
        base: The recipe that it is over, as it says; None for none.
    """

    name: str
    description: str
    error: str | None = None
    base: str | None = None


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


def parse_base(text: str, folder: Path) -> RecipeSource:
    """Return what a recipe in `folder` names as its base: as `parse_recipe_source`, or a folder.

    Raises:
        InvalidRequest: It is none of these.
    """
    if "/" in text and not text.startswith((UPLOADED, "/")) and "\0" not in text:
        return folder / text
    return parse_recipe_source(text, field="image.base")


def parse_image_source(text: str, *, field: str = "image") -> RecipeSource:
    """Return what `text` names: as `parse_recipe_source`, or else an image of a registry.

    Raises:
        InvalidRequest: It is neither; `context["field"]` is `field`.
    """
    if text.startswith((UPLOADED, "/")):
        return parse_recipe_source(text, field=field)
    name = text if _NAME.fullmatch(text) else None
    return RegistryImage(parse_reference(text, field=field), name)


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
