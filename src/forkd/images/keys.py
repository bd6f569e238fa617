"""Name an image after what goes into it, so that the name tells whether it is built already.

A key is the SHA-256 of everything a root file system is made from: the image part of the
recipe, the contents of its files, the settings written into it, and `BUILDER_VERSION`,
which changes when we build differently.  What only concerns the machine (CPUs, memory, the
warm-up) does not count.

Versions of Debian packages and of Python requirements do not count either, nor what a
registry's tag points to today: a key that changed with every security update could not be
known without the network.  `forkd build` on a deleted image fetches the newest ones, and
`manifest.json` says which they were.  Recipes that need a version pin it.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from forkd.errors import BuildError, HostError
from forkd.host import files
from forkd.images.oci import parse_reference
from forkd.images.recipe import DISK_MIB_DEFAULT, inside
from forkd.images.rootfs import default_mode, walk_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from forkd.images.modules import PlannedModules
    from forkd.images.recipe import Recipe, RecipeFile

BUILDER_VERSION = 3
"""Goes up whenever the same recipe would give another root file system."""

PIP_VERSION = 2
"""Likewise, for recipes with Python requirements alone."""

ADDITIONS_VERSION = 1
"""Likewise, for what a recipe adds to its base."""

START_BYTES = 64 * 1024
"""How much of a root file system is read to tell it from others."""

KEY_CHARACTERS = 32
"""Half of a SHA-256 in hex: enough to never meet twice, short enough to read."""


def image_key(
    recipe: Recipe, modules: PlannedModules | None = None, rootfs: Path | None = None
) -> str:
    """Return the key of the image that `recipe` describes, with these kernel modules in it.

    Reads its files and, where the image is a local one, the image.

    Args:
        recipe: What is built.
        modules: Modules of the kernel; None for none.
        rootfs: The root file system that it adds to, if it has a base.

    Raises:
        BuildError: One of these is missing.
    """
    try:
        ingredients = _ingredients(recipe)
        if modules is not None:
            ingredients["modules"] = modules.described()
        if rootfs is not None:
            ingredients["rootfs"] = _start_digest(rootfs)
    except HostError as error:
        raise BuildError(str(error), **error.context) from error
    canonical = json.dumps(ingredients, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:KEY_CHARACTERS]


def _ingredients(recipe: Recipe) -> dict[str, Any]:
    return {
        "builder": BUILDER_VERSION,
        "image": _source(recipe),
        "files": [list(_contents(recipe, each)) for each in recipe.files],
        "requirements": sorted(recipe.pip.requirements),
        "env": dict(recipe.env),
        "cwd": recipe.cwd,
        "user": recipe.user,
        "post_fork_command": recipe.warmup.post_fork_command,
        "disk_mib": recipe.machine.disk_mib or DISK_MIB_DEFAULT,
        **({"pip": PIP_VERSION} if recipe.pip.requirements else {}),
    }


def _source(recipe: Recipe) -> dict[str, Any]:
    source = recipe.image
    if recipe.under is not None:
        packages = sorted(set(source.packages))
        return {"base": _ingredients(recipe.under), "packages": packages, "by": ADDITIONS_VERSION}
    if source.debian is not None:
        described = source.debian.model_dump(mode="json")
        return {"debian": {**described, "packages": sorted(set(source.debian.packages))}}
    if source.oci is not None:
        reference = parse_reference(source.oci, recipe.folder)
        if reference.path is None:
            return {"oci": str(reference)}
        is_layout = files.is_folder(reference.path)
        index = reference.path / "index.json" if is_layout else reference.path
        tag = reference.rest.removeprefix(str(reference.path))
        return {"oci": [reference.transport, tag, file_digest(index)]}
    return {"rootfs": file_digest(recipe.folder / (source.rootfs or ""))}


def _start_digest(rootfs: Path) -> str:
    """Return what tells one build of a root file system from another of the same key.

    The start of ext4 has its time, and checksums over what tells the used blocks from the free.
    """
    start, _ = files.read_start(rootfs, START_BYTES) or (b"", 0)
    return hashlib.sha256(start).hexdigest()


def _contents(recipe: Recipe, entry: RecipeFile) -> Iterator[list[Any]]:
    """Give target, mode and digest of each file that an entry puts into the image."""
    for path, target in recipe_files(recipe, entry):
        yield [target, file_mode(path, entry), file_digest(path)]


def recipe_files(recipe: Recipe, entry: RecipeFile) -> Iterator[tuple[Path, str]]:
    """Give each file that an entry of `files` stands for, with its path in the guest.

    Raises:
        BuildError: The entry's source does not exist.
    """
    source = inside(recipe.folder, entry.source)
    if files.is_file(source):
        yield source, entry.target
    elif files.is_folder(source):
        for path, relative in walk_files(source):
            yield path, f"{entry.target.rstrip('/')}/{relative}"
    else:
        raise BuildError(f"no file at {source}", path=str(source))


def file_mode(path: Path, entry: RecipeFile) -> int:
    """Return the permissions that a recipe's file gets in the guest."""
    return default_mode(path) if entry.mode is None else entry.mode


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with files.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
