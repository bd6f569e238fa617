"""Build all that a recipe's machine boots, or find it built.

    recipe ── kernel ──────────────────────── initramfs (with our agent)
         └─── packages | oci ── files ── pip ── rootfs ── image in the cache

The root file system is built aside and gets its name in the cache when it is whole, under a
lock that makes a second builder of the same image wait and then find it.  Whatever goes
wrong ends in one `BuildError` (or `InvalidRequest` for the recipe), and leaves nothing.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from forkd.errors import BuildError, HostError
from forkd.host import files, folders
from forkd.images import debian, initramfs, kernel, keys, namespace, oci, pip, rootfs
from forkd.images.recipe import DISK_MIB_DEFAULT, load_recipe
from forkd.images.steps import Build
from forkd.model.image import Image

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.host.process import Cancel
    from forkd.images.layout import Cache
    from forkd.images.recipe import Recipe
    from forkd.model.progress import Progress

IMAGE_JSON = PurePosixPath("/etc/forkd/image.json")
"""Where the agent finds an image's settings in the guest."""

ROOTFS_NAME = "rootfs.ext4"


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What the agent uses for every process that does not say otherwise.

    Attributes:
        env: Environment.
        cwd: Working directory.
        user: Name, or `uid[:gid]`.
        post_fork_command: Run in each child; empty for none.
    """

    env: dict[str, str]
    cwd: str
    user: str
    post_fork_command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """A recipe, and all that its machine boots.

    Attributes:
        image: The files.
        recipe: Shape of the machine, warm-up, kernel command line.
        config: Settings of the image, the recipe's over the OCI image's.
        kernel_version: Names the kernel: Debian's release and version, or `custom`.
    """

    image: Image
    recipe: Recipe
    config: ImageConfig
    kernel_version: str


@dataclass(frozen=True, slots=True)
class Rootfs:
    """A root file system in the cache."""

    key: str
    path: Path
    disk_bytes: int
    config: ImageConfig


def build(  # noqa: PLR0913 - what a build is told
    recipe_path: Path,
    *,
    cache: Cache,
    agent: Path | None,
    progress: Callable[[Progress], None],
    cancel: Cancel | None = None,
    confined: bool = False,
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

    Raises:
        NotFound: There is no recipe.
        InvalidRequest: The recipe says something it may not.
        BuildError: Something it needs is missing, or failed, or changed meanwhile, or `cancel`
            was set.
        CapacityError: The host has no room for it, or no more files, processes or memory.
    """
    recipe = load_recipe(recipe_path, confined=confined)
    return build_recipe(recipe, cache, agent, Build(progress, cancel))


def build_recipe(recipe: Recipe, cache: Cache, agent: Path | None, build: Build) -> BuiltImage:
    """Build the image of a recipe that was read already; see `build`."""
    try:
        chosen = _kernel(recipe, cache, build)
        first = initramfs.build_initramfs(chosen, agent, cache, build) if agent else None
        root = build_rootfs(recipe, cache, build)
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
    return BuiltImage(image, recipe, root.config, chosen.version)


def build_rootfs(recipe: Recipe, cache: Cache, build: Build) -> Rootfs:
    """Return the root file system of a recipe from the cache, built if it is not there."""
    key = keys.image_key(recipe)
    folder = cache.images / key

    def remove(path: Path) -> None:
        namespace.remove(path, build)

    cache.sweep(remove)
    wait = build.waiting("rootfs", f"waiting for another builder of {recipe.name}")
    with cache.lock(f"image-{key}", wait):
        if files.is_there(folder):
            build.tell("rootfs", f"image {recipe.name} {key}, from the cache", 1.0)
            return _stored(folder)
        with cache.partial(folder, remove) as aside:
            _make(recipe, key, aside, build)
            if keys.image_key(recipe) != key:
                raise BuildError(
                    f"the files of {recipe.name} changed while its image was built; build it again",
                    stage="rootfs",
                )
            files.publish(aside, folder)
    return _stored(folder)


def _kernel(recipe: Recipe, cache: Cache, build: Build) -> kernel.Kernel:
    machine = recipe.machine
    if machine.kernel == "debian":
        return kernel.debian_kernel(cache, build)
    modules = recipe.folder / machine.modules if machine.modules is not None else None
    return kernel.given_kernel(recipe.folder / machine.kernel, modules)


def _stored(folder: Path) -> Rootfs:
    path = folder / ROOTFS_NAME
    values = json.loads(files.read_all(folder / "image.json"))
    config = ImageConfig(**{**values, "post_fork_command": tuple(values["post_fork_command"])})
    disk_bytes = files.size_bytes(path)
    if disk_bytes is None:
        raise BuildError(f"{path} is missing: remove {folder}, and build it again")
    return Rootfs(folder.name, path, disk_bytes, config)


def _make(recipe: Recipe, key: str, aside: Path, build: Build) -> None:
    """Put everything that the cache holds of an image into the folder `aside`."""
    started = time.monotonic()
    scratch = aside / "scratch"
    files.make_folder(scratch)  # private: programs in it may be set-uid
    if recipe.image.rootfs is not None:
        given = recipe.folder / recipe.image.rootfs
        rootfs.check_ext4(given)
        files.copy_sparse(given, aside / ROOTFS_NAME)
        config, packages = _config(recipe, None), dict[str, str]()
    else:
        folder, config, packages = _make_folder(recipe, scratch, build)
        target, disk_mib = aside / ROOTFS_NAME, _disk_mib(recipe)
        rootfs.make_ext4(folder, target, disk_mib=disk_mib, key=key, build=build)
    namespace.remove(scratch, build)
    folders.write(aside / "image.json", _json(asdict(config)))
    manifest = {
        "key": key,
        "name": recipe.name,
        "builder": keys.BUILDER_VERSION,
        "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "build_s": round(time.monotonic() - started, 1),
        "disk_bytes": files.size_bytes(aside / ROOTFS_NAME),
        "stored_bytes": files.tree_bytes(aside / ROOTFS_NAME),
        "packages": packages,
    }
    folders.write(aside / "manifest.json", _json(manifest))


def _make_folder(
    recipe: Recipe, scratch: Path, build: Build
) -> tuple[Path, ImageConfig, dict[str, str]]:
    """Make the root file system as a folder; return it, its settings and its packages."""
    source = recipe.image
    found: oci.OciConfig | None = None
    packages: dict[str, str] = {}
    if source.debian is not None:
        folder = scratch / "rootfs"
        folders.make(folder)
        debian.build_debian(source.debian, folder, build)
        packages = debian.installed_packages(folder)
    else:
        reference = oci.parse_reference(source.oci or "", recipe.folder)
        disk_bytes = _disk_mib(recipe) << 20
        folder, found = oci.build_oci(reference, scratch, build, disk_bytes=disk_bytes)
    config = _config(recipe, found)
    if recipe.pip.requirements:
        pip.install_requirements(recipe.pip.requirements, folder, scratch, build)
    for entry in recipe.files:
        for path, target in keys.recipe_files(recipe, entry):
            rootfs.install(folder, PurePosixPath(target), path, keys.file_mode(path, entry))
    rootfs.install(folder, IMAGE_JSON, _json(asdict(config)), 0o644)
    return folder, config, packages


def _disk_mib(recipe: Recipe) -> int:
    return recipe.machine.disk_mib or DISK_MIB_DEFAULT


def _config(recipe: Recipe, found: oci.OciConfig | None) -> ImageConfig:
    """Lay the recipe's settings over the image's own."""
    base = found or oci.OciConfig({}, "/", "root")
    return ImageConfig(
        env={**base.env, **recipe.env},
        cwd=recipe.cwd or base.cwd,
        user=recipe.user or base.user,
        post_fork_command=recipe.warmup.post_fork_command or (),
    )


def _json(value: dict[str, Any]) -> bytes:
    return f"{json.dumps(value, indent=2, sort_keys=True)}\n".encode()
