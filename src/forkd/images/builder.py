"""Build all that a recipe's machine boots, or find it built.

    recipe ── kernel ──────────────────────── initramfs (with our agent)
         │         └────────── modules ────┐
         └─── packages | oci ── pip ── files ── rootfs ── image in the cache

The root file system is built aside and gets its name in the cache when it is whole, under a
lock that makes a second builder of the same image wait and then find it.  Whatever goes
wrong ends in one `BuildError` (or `InvalidRequest` for the recipe), and leaves nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import BuildError, HostError
from forkd.host import files, folders
from forkd.images import initramfs, kernel, keys, modules, namespace, plan, rootfs
from forkd.images.apart import make_apart
from forkd.images.plan import ROOTFS_NAME, ImageConfig
from forkd.images.recipe import load_recipe
from forkd.images.steps import Build
from forkd.model.image import Image

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.host.process import Cancel
    from forkd.images.apart import Cells
    from forkd.images.layout import Cache
    from forkd.images.modules import PlannedModules
    from forkd.images.plan import Plan
    from forkd.images.recipe import Recipe
    from forkd.model.progress import Progress


Keep = Callable[[str, Path], Path]
"""Keeps a root file system of this key and path for those who need it; returns where it is now."""


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """A recipe, and all that its machine boots.

    Attributes:
        image: The files.
        recipe: Shape of the machine, warm-up, kernel command line.
        config: Settings of the image, the recipe's over the OCI image's.
        kernel_version: Names the kernel: Debian's release and version, or `custom`.
        kernel_digest: The SHA-256 digest of its file, as hex.
    """

    image: Image
    recipe: Recipe
    config: ImageConfig
    kernel_version: str
    kernel_digest: str


@dataclass(frozen=True, slots=True)
class Rootfs:
    """A root file system in the cache."""

    key: str
    path: Path
    disk_bytes: int
    config: ImageConfig


@dataclass(frozen=True, slots=True)
class Additions:
    """What a recipe adds to its base, in the cache.

    Attributes:
        key: What it is called.
        archive: A tar archive of files, links and folders.
        replaced: What in it takes the place of something of another kind.
        config: Settings of the image.
    """

    key: str
    archive: Path
    replaced: tuple[str, ...]
    config: ImageConfig


def build(  # noqa: PLR0913 - what a build is told
    recipe_path: Path,
    *,
    cache: Cache,
    agent: Path | None,
    progress: Callable[[Progress], None],
    cancel: Cancel | None = None,
    confined: bool = False,
    cells: Cells | None = None,
) -> BuiltImage:
    """Build the image of a recipe, unless the cache has it.

    Blocks for as long as it takes, minutes for a new image: give it a thread.

    Args:
        recipe_path: A folder with a `recipe.toml`, or such a file.
        cache: Where everything is kept.
        agent: The guest agent, a static program; without it there is no initramfs.
        progress: Called in this thread with each step.
        cancel: Ends the build when set, from any thread.
        confined: Refuse a recipe that names files outside of its folder.
        cells: Where what is somebody else's is handled; None for this very process.

    Raises:
        NotFound: There is no recipe.
        InvalidRequest: The recipe says something it may not.
        BuildError: Something it needs is missing, or failed, or changed meanwhile, or `cancel`
            was set.
        CapacityError: The host has no room for it, or no more files, processes or memory.
    """
    recipe = load_recipe(recipe_path, confined=confined)
    return build_recipe(recipe, cache, agent, Build(progress, cancel), cells)


def build_recipe(  # noqa: PLR0913, PLR0917 - what it is made of, and where
    recipe: Recipe,
    cache: Cache,
    agent: Path | None,
    build: Build,
    cells: Cells | None = None,
    keep: Keep | None = None,
) -> BuiltImage:
    """Build the image of a recipe that was read already; see `build` and `build_rootfs`.

    Of a recipe over a base, that is the base's image, and what is added to it in its place.
    """
    if recipe.under is not None:
        base = build_recipe(recipe.under, cache, agent, build, cells, keep)
        added = build_additions(recipe, base.image.rootfs, base.config, cache, build, cells)
        image = replace(base.image, key=added.key, name=recipe.name, rootfs=added.archive)
        return replace(base, image=image, recipe=recipe, config=added.config)
    try:
        chosen = kernel_of(recipe, cache, build)
        first = initramfs.build_initramfs(chosen, agent, cache, build) if agent else None
        chosen_modules = modules.choose(chosen, recipe.image.wanted_modules)
        root = build_rootfs(recipe, cache, build, cells, chosen_modules, keep)
    except HostError as error:
        raise BuildError(f"cannot build {recipe.name}: {error}", **error.context) from error
    image = Image(
        key=root.key,
        name=recipe.name,
        kernel=chosen.vmlinuz,
        initramfs=first,
        rootfs=root.path,
        disk_bytes=root.disk_bytes,
    )
    digest = keys.file_digest(chosen.vmlinuz)
    return BuiltImage(image, recipe, root.config, chosen.version, digest)


def build_rootfs(  # noqa: PLR0913, PLR0917 - what it is made of, and where
    recipe: Recipe,
    cache: Cache,
    build: Build,
    cells: Cells | None = None,
    chosen_modules: PlannedModules | None = None,
    keep: Keep | None = None,
) -> Rootfs:
    """Return the root file system of a recipe from the cache, built if it is not there.

    Nobody removes it from the cache before `keep` has returned.
    """

    def identify() -> str:
        return keys.image_key(recipe, chosen_modules)

    def fill(key: str, aside: Path) -> None:
        planned = plan.plan_of(recipe, key, chosen_modules, build.registries)
        _make(recipe, planned, aside, build, cells)

    with _cached(f"image {recipe.name}", recipe, identify, fill, cache, build) as folder:
        return _kept(_stored(folder), keep)


def build_additions(  # noqa: PLR0913, PLR0917 - what it is made of, and where
    recipe: Recipe,
    base: Path,
    config: ImageConfig,
    cache: Cache,
    build: Build,
    cells: Cells | None = None,
) -> Additions:
    """Return what a recipe adds to its base from the cache, built if it is not there.

    Args:
        recipe: A recipe over a base.
        base: The root file system of the base.
        config: Settings of the base.
        cache: As `build`.
        build: What it is a part of.
        cells: As `build`.

    Raises:
        ForkdError: As `build`.
    """

    def identify() -> str:
        return keys.image_key(recipe, rootfs=base)

    def fill(key: str, aside: Path) -> None:
        _add(recipe, key, base, aside, build, cells)

    with _cached(f"what {recipe.name} adds,", recipe, identify, fill, cache, build) as folder:
        replaced = plan.Replaced.model_validate_json(files.read_all(folder / "replaced.json"))
    changed = {
        "env": {**config.env, **recipe.env},
        "cwd": recipe.cwd or config.cwd,
        "user": recipe.user or config.user,
        "post_fork_command": recipe.warmup.post_fork_command or (),
    }
    archive = folder / plan.ADDITIONS_NAME
    return Additions(folder.name, archive, replaced.paths, config.model_copy(update=changed))


@contextlib.contextmanager
def _cached(  # noqa: PLR0913, PLR0917 - what is built, and where
    what: str,
    recipe: Recipe,
    identify: Callable[[], str],
    fill: Callable[[str, Path], None],
    cache: Cache,
    build: Build,
) -> Iterator[Path]:
    """Give the folder of something in the cache of images, which nobody removes within the block.

    Args:
        what: What it is, in words.
        recipe: What it is built for.
        identify: Returns its key, by what it is built of.
        fill: Builds it, if it is not there, into a folder; is told the key.
        cache: Where it is kept.
        build: What it is a part of.

    Raises:
        BuildError: What it is built of has changed meanwhile.
    """

    def remove(path: Path) -> None:
        namespace.remove(path, build)

    key = identify()
    folder = cache.images / key
    cache.sweep(remove)
    wait = build.waiting("rootfs", f"waiting for another builder of {recipe.name}")
    with cache.lock(f"image-{key}", wait):
        if files.is_there(folder):
            build.tell("rootfs", f"{what} {key}, from the cache", 1.0)
            with contextlib.suppress(HostError):  # a cache that others only read
                files.touch(folder)
        else:
            with cache.partial(folder, remove) as aside:
                fill(key, aside)
                if identify() != key:
                    raise BuildError(
                        f"the files of {recipe.name} changed while its image was built; build it "
                        "again",
                        stage="rootfs",
                    )
                files.publish(aside, folder)
        yield folder


def _add(  # noqa: PLR0913, PLR0917 - as `build_additions`
    recipe: Recipe, key: str, base: Path, aside: Path, build: Build, cells: Cells | None
) -> None:
    """Put everything that the cache holds of what a recipe adds into the folder `aside`."""
    started = time.monotonic()
    archive, scratch = aside / plan.ADDITIONS_NAME, aside / "scratch"
    files.make_folder(scratch)
    planned = plan.plan_over(recipe, key, base, build.registries)
    replaced: tuple[str, ...] = ()
    packages: dict[str, str] = {}
    if recipe.image.packages or recipe.pip.requirements:
        if cells is None:
            made = plan.make(planned, plan.Workshop(scratch, archive), build)
        else:
            with cells() as cell:
                made = make_apart(planned, scratch, archive, cell, build)
        replaced, packages = made.replaced, dict(made.packages)
    else:  # its own files, for which nothing is to be known of the base
        plan.write_files(plan.plan_of(recipe, key).files, scratch / "rootfs", archive)
    namespace.remove(scratch, build)
    folders.write(aside / "replaced.json", plan.Replaced(paths=replaced).model_dump_json().encode())
    _write_manifest(aside, recipe, planned, archive, packages, started, build)


def _kept(root: Rootfs, keep: Keep | None) -> Rootfs:
    return root if keep is None else replace(root, path=keep(root.key, root.path))


def kernel_of(recipe: Recipe, cache: Cache, build: Build) -> kernel.Kernel:
    """Return the kernel that a recipe's machine boots, fetched unless the cache has it."""
    said_by, machine = recipe.under or recipe, recipe.machine
    if kernel.is_debian(machine.kernel):
        return kernel.debian_kernel(cache, build, kernel.series_of(machine.kernel))
    folder = said_by.folder / machine.modules if machine.modules is not None else None
    return kernel.given_kernel(said_by.folder / machine.kernel, folder)


def _stored(folder: Path) -> Rootfs:
    path = folder / ROOTFS_NAME
    config = ImageConfig.model_validate_json(files.read_all(folder / "image.json"))
    disk_bytes = files.size_bytes(path)
    if disk_bytes is None:
        raise BuildError(f"{path} is missing: remove {folder}, and build it again")
    return Rootfs(folder.name, path, disk_bytes, config)


def _reference_of(planned: Plan) -> str | None:
    """Return the image of a registry that a root file system is made of; None for others."""
    source = planned.oci
    return None if source is None or source.path is not None else source.rest.removeprefix("//")


def _make(recipe: Recipe, planned: Plan, aside: Path, build: Build, cells: Cells | None) -> None:
    """Put everything that the cache holds of an image into the folder `aside`."""
    started = time.monotonic()
    image, scratch = aside / ROOTFS_NAME, aside / "scratch"
    files.make_folder(scratch)  # private: programs in it may be set-uid
    if recipe.image.rootfs is not None:
        given = recipe.folder / recipe.image.rootfs
        rootfs.check_ext4(given)
        files.copy_sparse(given, image)
        made = plan.Made(config=planned.config(None), packages={})
    elif cells is None:
        made = plan.make(planned, plan.Workshop(scratch, image), build)
    else:
        with cells() as cell:
            made = make_apart(planned, scratch, image, cell, build)
    namespace.remove(scratch, build)
    folders.write(aside / "image.json", plan.to_json(made.config.model_dump(mode="json")))
    _write_manifest(aside, recipe, planned, image, dict(made.packages), started, build)


def _write_manifest(  # noqa: PLR0913, PLR0917 - what is said
    aside: Path,
    recipe: Recipe,
    planned: Plan,
    result: Path,
    packages: dict[str, str],
    started_s: float,
    build: Build,
) -> None:
    """Say in the cache what was built."""
    manifest = {
        "key": planned.key,
        "name": recipe.name,
        "tenant": build.tenant,
        "reference": _reference_of(planned),
        "builder": keys.BUILDER_VERSION,
        "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "build_s": round(time.monotonic() - started_s, 1),
        "disk_bytes": files.size_bytes(result),
        "stored_bytes": files.tree_bytes(result),
        "packages": packages,
    }
    folders.write(aside / "manifest.json", plan.to_json(manifest))
