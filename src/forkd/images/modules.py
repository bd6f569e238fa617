"""Choose which of a kernel's modules an image has, and put them where `modprobe` finds them.

A stock kernel has next to nothing built in: FUSE, loop devices, packet filters, bridges and most
file systems are modules.  They are copied into the root file system, under the kernel's release,
when the image is built: on the disk they cost a fork nothing, and a page of memory only once they
are used.  `depmod` then writes the tables for what is there, so that whatever is left out is simply
unknown in the guest.

`DEFAULT` has what programs in a virtual machine ask for.  Drivers of hardware are not in it: such a
machine has none.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from forkd.errors import BuildError, HostError
from forkd.host import files, folders
from forkd.images import rootfs
from forkd.images.compressed import read_module
from forkd.images.initramfs import (
    built_in_modules,
    load_order,
    module_name,
    parse_dependencies,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from forkd.images.kernel import Kernel
    from forkd.images.steps import Build

Wanted = str | tuple[str, ...]
"""What a recipe says: `default`, `all`, `none`, or names."""

DEPMOD_TIMEOUT_S = 300.0

DEFAULT_FOLDERS = (
    "kernel/crypto",
    "kernel/fs/fat",
    "kernel/fs/fuse",
    "kernel/fs/isofs",
    "kernel/fs/nls",
    "kernel/net/8021q",
    "kernel/net/bridge",
    "kernel/net/ipv4",
    "kernel/net/ipv6",
    "kernel/net/netfilter",
    "kernel/net/netlink",
    "kernel/net/packet",
    "kernel/net/sched",
    "kernel/net/tls",
    "kernel/net/unix",
    "kernel/net/xfrm",
)
"""Of these all modules belong to `DEFAULT`."""

DEFAULT_NAMES = (
    *("autofs4", "binfmt_misc", "btrfs", "configfs", "erofs", "exfat", "ext4", "nfs", "nfsv3"),
    *("nfsv4", "overlay", "squashfs", "udf", "xfs"),
    *("bonding", "dummy", "geneve", "ifb", "ipvlan", "macvlan", "macvtap", "tap", "tun", "veth"),
    *("vrf", "vxlan", "wireguard"),
    *("brd", "dm_crypt", "dm_mod", "dm_snapshot", "dm_thin_pool", "loop", "nbd", "zram"),
    "ptp_kvm",
)
"""These, too, as far as a kernel has them."""

_RELEASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+~-]{0,63}")
"""What a kernel may call itself; the name of a folder in every guest."""

_TABLES = ("modules.builtin", "modules.builtin.modinfo", "modules.order")
"""What `depmod` reads besides the modules."""

_MODPROBE = PurePosixPath("/sbin/modprobe")
_OUR_MODPROBE = "/run/forkd/bin/modprobe"
"""Where the agent is called so, in a running guest."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlannedModule(_Frozen):
    """A module that is put into the root file system."""

    path: Path
    name: str
    """Its path below the folder of all modules."""


class PlannedModules(_Frozen):
    """The modules of an image.

    Attributes:
        release: What their kernel calls itself.
        source: Names their contents: the same for the same kernel.
        files: The modules, and the tables that describe what is built in.
    """

    release: str
    source: str
    files: tuple[PlannedModule, ...]

    def described(self) -> list[object]:
        """Return what an image's key depends on."""
        return [self.release, self.source, [each.name for each in self.files]]


def choose(kernel: Kernel, wanted: Wanted) -> PlannedModules | None:
    """Return the modules of `kernel` that a recipe wants; None for none at all.

    Raises:
        BuildError: It wants one that the kernel has not, or what is in the kernel's folder of
            modules makes no sense.
    """
    folder = kernel.modules
    if wanted == "none" or (folder is None and isinstance(wanted, str)):
        return None
    if folder is None:
        raise BuildError(
            "a kernel by path has no modules unless machine.modules names their folder"
        )
    try:
        return _chosen(kernel, folder, wanted)
    except HostError as error:
        raise BuildError(f"cannot read the modules in {folder}: {error}") from error


def _chosen(kernel: Kernel, folder: Path, wanted: Wanted) -> PlannedModules | None:
    dependencies = parse_dependencies(files.read_all(folder / "modules.dep").decode())
    built_in = built_in_modules(folder)
    names = _names(wanted, dependencies, built_in)
    paths = sorted(load_order(names, dependencies, built_in))
    if not paths:
        return None
    release = _release(folder / paths[0])
    tables = [table for table in _TABLES if files.is_there(folder / table)]
    planned = [PlannedModule(path=folder / name, name=name) for name in (*paths, *tables)]
    # Debian's are the same for the same version, and need not be read to know that.
    source = _digest(planned) if kernel.version == "custom" else kernel.version
    return PlannedModules(release=release, source=source, files=tuple(planned))


def _names(
    wanted: Wanted, dependencies: Mapping[str, tuple[str, ...]], built_in: frozenset[str]
) -> list[str]:
    if isinstance(wanted, tuple):
        return [name.replace("-", "_") for name in wanted]
    if wanted == "all":
        return [module_name(path) for path in dependencies]
    there = {module_name(path): path for path in dependencies}
    in_folders = (name for name, path in there.items() if path.startswith(_PREFIXES))
    known = there.keys() | built_in
    return [*in_folders, *(name for name in DEFAULT_NAMES if name in known)]


_PREFIXES = tuple(f"{folder}/" for folder in DEFAULT_FOLDERS)


def _release(module: Path) -> str:
    """Read off a module which kernel it is for; the folder that it lies in may be called anything.

    Raises:
        BuildError: It does not say, or says what cannot be.
    """
    _, found, rest = read_module(module).partition(b"\0vermagic=")
    release = rest[:256].partition(b" ")[0].decode(errors="replace")
    if not found or _RELEASE.fullmatch(release) is None:
        raise BuildError(f"{module} does not say which kernel it is for", path=str(module))
    return release


def _digest(planned: Iterable[PlannedModule]) -> str:
    digest = hashlib.sha256()
    for each in planned:
        with files.opened(each.path) as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def install(planned: PlannedModules, root: Path, scratch: Path, build: Build) -> None:
    """Put modules into the root file system in the folder `root`, with tables for `modprobe`.

    An image without kmod gets a `modprobe`: the agent.

    Raises:
        BuildError: The image does not allow it, or a module is none.
    """
    build.tell("rootfs", f"{len(planned.files)} kernel modules", 0.0)
    base = scratch / "modules"
    place = PurePosixPath("/lib/modules") / planned.release
    staged = base / place.relative_to("/")
    for each in planned.files:
        target = staged / each.name
        folders.make(target.parent)
        folders.copy(each.path, target)
    # In a folder of ours: an image's own links could lead it out of the image.
    build.run(["depmod", "-b", base, planned.release], timeout_s=DEPMOD_TIMEOUT_S)
    rootfs.install_tree(root, place, staged)
    rootfs.link_if_missing(root, _MODPROBE, _OUR_MODPROBE)
    files.remove_tree(base)
