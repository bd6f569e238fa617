"""Plan a root file system from a recipe, and make it, here or in a cell.

A plan is all that the making needs: the recipe is not read again, and nothing of this host but the
files that the plan names.  So it can be written down, and made by a process that sees no more.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from forkd.errors import BuildError
from forkd.host import differences, files, folders
from forkd.images import debian, keys, modules, oci, pip, rootfs
from forkd.images.manifests import OciConfig
from forkd.images.modules import PlannedModules
from forkd.images.namespace import run_as_root
from forkd.images.recipe import DISK_MIB_DEFAULT, DebianSource
from forkd.model.image import ImageConfig as ProgramConfig

if TYPE_CHECKING:
    from forkd.images.recipe import Recipe
    from forkd.images.registries import Registries
    from forkd.images.steps import Build

IMAGE_JSON = PurePosixPath("/etc/forkd/image.json")
"""Where the agent finds an image's settings in the guest."""

ROOTFS_NAME = "rootfs.ext4"

ADDITIONS_NAME = "additions.tar"
"""What a recipe adds to its base, in the place of a root file system."""

DIFFER_TIMEOUT_S = 1_800.0
"""How long it may take to compare two root file systems."""

ROOM_MIB = 512
"""What a disk has besides the image and half as much again, if nobody chose its size."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ImageConfig(_Frozen):
    """What the agent uses for every process that does not say otherwise.

    Attributes:
        env: Environment.
        cwd: Working directory.
        user: Name, or `uid[:gid]`.
        post_fork_command: Run in each child; empty for none.
        entrypoint: The program that the image is for; None if it names none.
        cmd: Its arguments, or the program.
    """

    env: Mapping[str, str]
    cwd: str
    user: str
    post_fork_command: tuple[str, ...]
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None

    def for_agent(self) -> bytes:
        """Return what the agent reads of it in the guest."""
        return to_json(self.model_dump(mode="json", exclude={"entrypoint", "cmd"}))

    def for_programs(self) -> ProgramConfig:
        """Return what it says of programs, as a snapshot keeps it."""
        return ProgramConfig(self.env, self.cwd, self.user, self.entrypoint, self.cmd)


class PlannedFile(_Frozen):
    """A file that is put into the root file system."""

    path: Path
    target: str
    mode: int


class PlannedOci(_Frozen):
    """Where an OCI image is; the members of `oci.OciReference`."""

    transport: str
    rest: str
    path: Path | None
    shown: str | None = None
    insecure: bool = False
    auth_file: Path | None = None


class Plan(_Frozen):
    """What a root file system is made of.

    Attributes:
        key: What it is called in the cache.
        debian: Packages that it consists of; or else:
        oci: The image that it is unpacked from.
        requirements: Python packages.
        modules: Of the kernel; None for none.
        files: What is put over these.
        env: Settings of the recipe; those that it does not make are the OCI image's.
        cwd: Likewise.
        user: Likewise.
        post_fork_command: Likewise.
        disk_mib: Its size; None to have it follow from the image.
        over: The root file system that what is made is compared with; only what it lacks is kept.
    """

    key: str
    debian: DebianSource | None
    oci: PlannedOci | None
    requirements: tuple[str, ...]
    modules: PlannedModules | None = None
    files: tuple[PlannedFile, ...]
    env: Mapping[str, str]
    cwd: str | None
    user: str | None
    post_fork_command: tuple[str, ...]
    disk_mib: int | None
    over: Path | None = None

    def config(self, found: OciConfig | None) -> ImageConfig:
        """Lay the recipe's settings over the image's own."""
        base = found or OciConfig({}, "/", "root")
        return ImageConfig(
            env={**base.env, **self.env},
            cwd=self.cwd or base.cwd,
            user=self.user or base.user,
            post_fork_command=self.post_fork_command,
            entrypoint=base.entrypoint,
            cmd=base.cmd,
        )


class Made(_Frozen):
    """What was made, besides the file system.

    Attributes:
        config: Settings of the image.
        packages: Version of each Debian package in it.
        replaced: What it adds to a base in the place of something of another kind.
    """

    config: ImageConfig
    packages: Mapping[str, str]
    replaced: tuple[str, ...] = ()


class Replaced(_Frozen):
    """What is added to a base in the place of something of another kind, by its path."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where a root file system is made.

    Attributes:
        scratch: A folder for what is needed meanwhile; private, as programs in it may be set-uid.
        image: The file that the file system is written to.
        tools: Programs that are found before others of their name; None for none.
    """

    scratch: Path
    image: Path
    tools: Path | None = None


def plan_of(
    recipe: Recipe,
    key: str,
    chosen_modules: PlannedModules | None = None,
    registries: Registries | None = None,
) -> Plan:
    """Return what the root file system of a recipe is made of.

    Raises:
        BuildError: A file that the recipe names is missing.
        InvalidRequest: It names no image of a registry.
    """
    source, reference = recipe.image, None
    if source.oci is not None:
        found = oci.parse_reference(source.oci, recipe.folder)
        if found.path is None and registries is not None:
            found = replace(found, **asdict(registries.access(found.rest)))
        reference = PlannedOci(**asdict(found))
    return Plan(
        key=key,
        debian=source.debian,
        oci=reference,
        requirements=recipe.pip.requirements,
        modules=chosen_modules,
        files=tuple(
            PlannedFile(path=path, target=target, mode=keys.file_mode(path, entry))
            for entry in recipe.files
            for path, target in keys.recipe_files(recipe, entry)
        ),
        env=recipe.env,
        cwd=recipe.cwd,
        user=recipe.user,
        post_fork_command=recipe.warmup.post_fork_command or (),
        disk_mib=recipe.machine.disk_mib,
    )


def result_name(plan: Plan) -> str:
    """Return what the file is called that is made of a plan."""
    return ROOTFS_NAME if plan.over is None else ADDITIONS_NAME


def plan_over(recipe: Recipe, key: str, rootfs: Path, registries: Registries | None) -> Plan:
    """Return what has all that a recipe and its base say, but for the kernel's modules.

    Args:
        recipe: A recipe over a base.
        key: What it is called in the cache.
        rootfs: The root file system of the base, with which it is compared.
        registries: As `plan_of`.

    Raises:
        BuildError: As `plan_of`.
    """
    under = recipe.under
    assert under is not None  # noqa: S101 - it is over a base
    below, own = plan_of(under, key, None, registries), plan_of(recipe, key)
    source = below.debian
    if source is not None:
        packages = tuple(dict.fromkeys((*source.packages, *recipe.image.packages)))
        source = source.model_copy(update={"packages": packages})
    return below.model_copy(
        update={
            "debian": source,
            "requirements": tuple(dict.fromkeys((*below.requirements, *own.requirements))),
            "files": (*below.files, *own.files),
            "over": rootfs,
        }
    )


def make(plan: Plan, workshop: Workshop, build: Build) -> Made:
    """Make what a plan says.

    Raises:
        BuildError: Something it needs is missing, or failed, or `build` was cancelled.
    """
    folder, found, layers_bytes = _source(plan, workshop, build)
    packages = debian.installed_packages(folder) if plan.debian is not None else {}
    config = plan.config(found)
    if plan.requirements:
        pip.install_requirements(plan.requirements, folder, workshop.scratch, build)
    if plan.modules is not None:
        modules.install(plan.modules, folder, workshop.scratch, build)
    for each in plan.files:
        rootfs.install(folder, PurePosixPath(each.target), each.path, each.mode)
    if plan.over is not None:
        replaced = _write_additions(folder, plan.over, workshop, build)
        return Made(config=config, packages=packages, replaced=replaced)
    rootfs.install(folder, IMAGE_JSON, config.for_agent(), 0o644)
    target, disk_mib = workshop.image, plan.disk_mib or disk_mib_for(layers_bytes)
    rootfs.make_ext4(folder, target, disk_mib=disk_mib, key=plan.key, build=build)
    return Made(config=config, packages=packages)


def write_files(planned: tuple[PlannedFile, ...], folder: Path, archive: Path) -> None:
    """Write files as an archive with nothing else in it.

    Args:
        planned: The files.
        folder: Where they are put together; made.
        archive: What is written.
    """
    folders.make(folder)
    for each in planned:
        rootfs.install(folder, PurePosixPath(each.target), each.path, each.mode)
    differences.write_files(folder, archive)


def _write_additions(folder: Path, base: Path, workshop: Workshop, build: Build) -> tuple[str, ...]:
    """Write what a folder has that a root file system lacks; return what changes its kind."""
    build.tell("rootfs", "comparing with the base", 0.0)
    rootfs.check_ext4(base)
    under, said = workshop.scratch / "base", workshop.scratch / "replaced.json"
    folders.make(under)
    dump: list[str | Path] = ["debugfs", "-R", f'rdump / "{under}"', base]
    run_as_root(dump, build, timeout_s=rootfs.EXT4_TIMEOUT_S)
    if not files.is_folder(under / "lost+found"):
        raise BuildError(f"{base} could not be read", path=str(base))
    differ: list[str | Path] = [sys.executable, "-P", "-m", "forkd.images", "differ"]
    differ += [folder, under, workshop.image, said]
    run_as_root(differ, build, timeout_s=DIFFER_TIMEOUT_S)
    build.tell("rootfs", f"{files.tree_bytes(workshop.image) >> 20} MiB beside the base", 1.0)
    return tuple(json.loads(files.read_all(said)))


def disk_mib_for(layers_bytes: int) -> int:
    """Return the size of a disk that nobody chose, for an image whose layers hold so much.

    It has room for the image and half as much again, and for the kernel's modules.
    """
    return max(DISK_MIB_DEFAULT, math.ceil(layers_bytes * 3 / 2 / (1 << 20)) + ROOM_MIB)


def _source(plan: Plan, workshop: Workshop, build: Build) -> tuple[Path, OciConfig | None, int]:
    """Make what the recipe's own files are put over, as a folder."""
    if plan.oci is not None:
        reference = oci.OciReference(**plan.oci.model_dump())
        disk_bytes = (plan.disk_mib or DISK_MIB_DEFAULT) << 20
        return oci.build_oci(reference, workshop.scratch, build, disk_bytes=disk_bytes)
    folder = workshop.scratch / "rootfs"
    folders.make(folder)
    debian.build_debian(plan.debian or DebianSource(), folder, build, tools=workshop.tools)
    return folder, None, 0


def to_json(value: dict[str, Any]) -> bytes:
    """Return a value as it is written into an image and beside it."""
    return f"{json.dumps(value, indent=2, sort_keys=True)}\n".encode()
