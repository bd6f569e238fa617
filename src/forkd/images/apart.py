"""Make a root file system in a cell, and believe nothing of what comes out of it.

Maintainer scripts, layers of images and wheels are somebody else's.  What handles them is a process
of its own in a cell (`forkd.host.cells`): root of a user namespace, so that files get the owners
that they will have in the guest, without rights over anything but one folder.

    scratch/             closed to others
        work/            all that the cell may write: inputs, what is made of them, the result
        tools/           what stands before `apt-get` and `chroot` in there

Builders need mirrors, indexes and registries, so a cell has the host's network.  Those programs of
it that need none are started without: what unpacks, and what runs maintainer scripts.  The `tools`
do that for mmdebstrap, whose download of packages is made a step of its own.  What runs maintainer
scripts also has fewer rights than what started it, so it can neither trace it nor mount anything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from forkd.errors import BuildError
from forkd.host import cells, files, folders, ownership, process
from forkd.images import children, mirrors, pip, rootfs
from forkd.images.modules import PlannedModule
from forkd.images.plan import ROOTFS_NAME, Made, Plan, PlannedFile, PlannedOci, result_name

if TYPE_CHECKING:
    from forkd.host.cells import Cell
    from forkd.images.steps import Build

Cells = Callable[[], AbstractContextManager["Cell"]]
"""Gives a cell for one build."""

PLAN_NAME, MADE_NAME = "plan.json", "made.json"

MADE_BYTES_MAX = 8 << 20
"""Most that a cell may say of what it made: names and versions of some ten thousand packages."""

BUILD_TIMEOUT_S = 4 * 3_600.0
"""How long all of a build in a cell may take; each of its steps has a limit of its own."""

BUILDER_PATHS = tuple(
    map(
        Path,
        (
            "/etc/apt", "/etc/debian_version", "/etc/dpkg", "/etc/group", "/etc/mke2fs.conf",
            "/etc/os-release", "/etc/passwd", "/etc/pip.conf",
        ),
    )
)  # fmt: skip
"""What the tools of a build read, besides programs; each is readable to every user of the host."""

IMAGE_MODE = 0o644
"""Of a finished file system, as of one that was made without a cell."""

_OFFLINE = "/usr/bin/unshare --net -- /usr/bin/setpriv --bounding-set -sys_admin,-setpcap --"

TOOLS = {
    "chroot": f"""#!/bin/sh
# What is run in the root file system has no network, and may not mount.
exec {_OFFLINE} /usr/sbin/chroot "$@"
""",
    "apt-get": f"""#!/bin/sh
# Downloads have the network; what runs programs of packages, or could, has not.
case " $* " in
    *" DPkg::Chroot-Directory="*)
        /usr/bin/apt-get -o APT::Get::Download-Only=true "$@" || exit
        exec {_OFFLINE} /usr/bin/apt-get "$@" ;;
    *Dir::Etc::SourceList=/dev/null*) exec {_OFFLINE} /usr/bin/apt-get "$@" ;;
esac
exec /usr/bin/apt-get "$@"
""",
}
"""What is found in the place of programs that mmdebstrap starts."""


def make_apart(plan: Plan, scratch: Path, image: Path, cell: Cell, build: Build) -> Made:
    """Make what a plan says in a cell, and put its file system in the place of `image`.

    Args:
        plan: What to make.
        scratch: A folder that is closed to others; what is left in it is the caller's to remove.
        image: The file that it becomes.
        cell: Where it is made.
        build: What it is a part of.

    Raises:
        BuildError: As `plan.make`; or what came out is not what it was to be.
        CapacityError: The host has no room for it.
    """
    work, tools = scratch / "work", scratch / "tools"
    folders.make(work)
    folders.make(work / "tmp")
    folders.make(tools)
    for name, text in TOOLS.items():
        folders.write(tools / name, text.encode())
        folders.set_mode(tools / name, 0o755)
    staged = _stage(plan, work)
    folders.write(work / PLAN_NAME, staged.model_dump_json().encode())
    for each in (work, *folders.matching(work, "**/*")):
        ownership.give(each, cell.uid)
    args = children.command("make", "--json", work, tools)
    read = (*BUILDER_PATHS, *cells.python_paths(), tools)
    environment = process.plain_environment(*pip.SETTINGS, *mirrors.VARIABLES)
    environment |= {"HOME": "/tmp", "TMPDIR": str(work / "tmp")}  # noqa: S108 - the cell's
    command = cell.command(args, read=read, write=(work,), network=True)

    def start(hear: Callable[[str], None]) -> None:
        build.run(command, timeout_s=BUILD_TIMEOUT_S, env=environment, on_line=hear)

    children.told(build, start)
    return _taken(work / result_name(plan), image)


def _stage(plan: Plan, work: Path) -> Plan:
    """Copy what a plan names into the cell's folder; return the plan with these."""
    inputs = work / "inputs"
    folders.make(inputs)
    staged = []
    for number, each in enumerate(plan.files):
        path = inputs / f"file-{number}"
        _copy(each.path, path)
        staged.append(PlannedFile(path=path, target=each.target, mode=each.mode))
    modules = plan.modules
    if modules is not None:
        copies = []
        for number, module in enumerate(modules.files):
            path = inputs / f"module-{number}"
            _copy(module.path, path)
            copies.append(PlannedModule(path=path, name=module.name))
        modules = modules.model_copy(update={"files": tuple(copies)})
    image = plan.oci
    if image is not None and image.path is not None:
        path = inputs / "image"
        _copy(image.path, path)
        rest = str(path) + image.rest.removeprefix(str(image.path))
        shown = f"{image.transport}:{image.rest}"
        image = PlannedOci(transport=image.transport, rest=rest, path=path, shown=shown)
    if image is not None and image.auth_file is not None:
        path = inputs / "auth.json"
        _copy(image.auth_file, path)
        image = image.model_copy(update={"auth_file": path})
    over = plan.over
    if plan.over is not None:
        over = inputs / ROOTFS_NAME
        _copy(plan.over, over)
    changed = {"files": tuple(staged), "modules": modules, "oci": image, "over": over}
    return plan.model_copy(update=changed)


def _copy(source: Path, target: Path) -> None:
    """Copy a file, or the files of a folder, without their permissions."""
    if not files.is_folder(source):
        files.copy_sparse(source, target)
        return
    for path, relative in rootfs.walk_files(source):
        folders.make((target / relative).parent)
        files.copy_sparse(path, target / relative)


def _taken(result: Path, image: Path) -> Made:
    """Take what was made out of a cell in which no process is left."""
    made = files.read_foreign(result.with_name(MADE_NAME), MADE_BYTES_MAX + 1)
    if made is None or len(made) > MADE_BYTES_MAX:
        raise BuildError("the build said nothing of what it made, or too much")
    try:
        found = Made.model_validate_json(made)
    except ValidationError as error:
        raise BuildError(f"what the build said of what it made makes no sense: {error}") from error
    ownership.take_file(result)
    if result.name == ROOTFS_NAME:
        rootfs.check_ext4(result)
    folders.set_mode(result, IMAGE_MODE)
    files.rename(result, image)
    return found
