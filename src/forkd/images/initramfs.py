"""Build the initramfs: our agent as `/init`, and the modules that lead to the root file system.

    /init                      the agent, a static program
    /etc/forkd/modules         paths of the modules, one per line, in the order of loading
    /lib/modules/<name>.ko     the modules
    /dev /proc /run /sys /newroot, and /dev/console

A stock kernel has next to nothing built in, so the archive carries what `MODULES` names and
what these depend on.  It is not compressed: a microVM copies it faster than it unpacks it.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from forkd.errors import BuildError, HostError
from forkd.host import files, folders
from forkd.images import cpio
from forkd.images.compressed import SUFFIXES, read_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from forkd.images.kernel import Kernel
    from forkd.images.layout import Cache
    from forkd.images.steps import Build

MODULES = (
    "virtio_mmio",
    "virtio_blk",
    "virtio_net",
    "virtio_rng",
    "vmw_vsock_virtio_transport",
    "crc32c_generic",  # ext4 asks for "crc32c" by name; this one runs on every CPU
    "ext4",
    "overlay",
)
"""What a guest needs of a stock kernel, before its root is there and after."""

NOT_IN_ALL = frozenset({"crc32c_generic"})
"""Of `MODULES`, those that a kernel may lack: since Linux 6.15 ext4 calls crc32c as a library."""

NO_VIRTIO_MMIO = (
    "the kernel has no module virtio_mmio, and it is not built in: the devices of forkd's machines "
    "are virtio-mmio, so this kernel cannot boot in one; kernels of RHEL and its relatives lack it"
)

AGENT_BYTES_MAX = 64 * 1024 * 1024
"""Largest agent; it stays in the guest's memory."""

IDLE_S = 3_600.0
"""How long an archive with another agent than ours stays after it was last used: a bake of another
forkd reads it within seconds."""

_FORMAT = "forkd-initramfs-1"


def build_initramfs(kernel: Kernel, agent: Path, cache: Cache, build: Build) -> Path:
    """Return the initramfs of `kernel` with `agent` in it, made if the cache has none.

    Raises:
        BuildError: The agent is no static program, or the kernel lacks a module.
    """
    program = _read_agent(agent)
    modules = read_modules(kernel.modules)
    entries = archive_entries(program, modules)
    data = cpio.archive(entries)
    key = hashlib.sha256(_FORMAT.encode() + data).hexdigest()[:32]
    path = cache.initramfs / f"{key}.cpio"
    if not _still_used(path):
        files.write_atomic(path, data)
        for old in unused(cache, agent):
            files.remove_file(old)
    build.tell("initramfs", f"initramfs of {len(modules)} modules, {len(data) >> 10} KiB", 1.0)
    return path


def _still_used(archive: Path) -> bool:
    """Note that somebody uses an archive; return False if there is none."""
    try:
        return files.touch(archive)
    except HostError:
        return True  # the cache is another's, who looks after it


def unused(cache: Cache, agent: Path) -> tuple[Path, ...]:
    """Return the archives that no machine will be booted with again; blocks.

    Only a bake needs one.  Those with the agent of today stay, whatever kernel they are for; with
    another they stay as long as somebody may be about to boot one.

    Raises:
        BuildError: The agent cannot be read.
    """
    program = _read_agent(agent)
    if not folders.is_writable(cache.initramfs):
        return ()
    oldest = time.time() - IDLE_S
    archives = folders.matching(cache.initramfs, "*.cpio")
    return tuple(
        path
        for path in archives
        if (changed_at_s := files.changed_at_s(path)) is not None
        and changed_at_s < oldest
        and program not in files.read_all(path)
    )


def archive_entries(agent: bytes, modules: Mapping[str, bytes]) -> list[cpio.Entry]:
    """Return what is in the archive; `modules` are in the order of loading."""
    folders = ("dev", "etc", "etc/forkd", "lib", "lib/modules", "newroot", "proc", "run", "sys")
    order = "".join(f"/lib/modules/{name}\n" for name in modules)
    return [
        *(cpio.folder(name) for name in folders),
        cpio.character("dev/console", 5, 1),
        cpio.regular("init", agent, 0o755),
        cpio.regular("etc/forkd/modules", order.encode()),
        *(cpio.regular(f"lib/modules/{name}", data) for name, data in modules.items()),
    ]


def read_modules(folder: Path | None) -> dict[str, bytes]:
    """Return the modules in `folder` that a guest needs, by file name, in order of loading.

    Without a folder there are none: such a kernel has built in what it needs.

    Raises:
        BuildError: One is missing.
    """
    if folder is None:
        return {}
    try:
        dependencies = parse_dependencies(files.read_all(folder / "modules.dep").decode())
        built_in = built_in_modules(folder)
        there = {module_name(path) for path in dependencies} | built_in
        if "virtio_mmio" not in there:
            raise BuildError(NO_VIRTIO_MMIO, module="virtio_mmio")
        wanted = [name for name in MODULES if name in there or name not in NOT_IN_ALL]
        paths = load_order(wanted, dependencies, built_in)
        return {_file_name(path): read_module(folder / path) for path in paths}
    except HostError as error:
        raise BuildError(f"cannot read the modules in {folder}: {error}") from error


def parse_dependencies(text: str) -> dict[str, tuple[str, ...]]:
    """Return what `modules.dep` says: for each module's path, the paths it depends on.

    Raises:
        BuildError: It names a file outside of its folder: it may come from anyone.
    """
    lines = (line.partition(":") for line in text.splitlines() if ":" in line)
    table = {path: tuple(needed.split()) for path, _, needed in lines}
    for path in itertools.chain(table, *table.values()):
        if path.startswith("/") or ".." in path.split("/"):
            raise BuildError(f"modules.dep names a file outside of its folder: {path}")
    return table


def load_order(
    names: Iterable[str], dependencies: Mapping[str, tuple[str, ...]], built_in: frozenset[str]
) -> list[str]:
    """Return the paths of the modules `names` and all they need, each after what it needs.

    Raises:
        BuildError: A module is neither there nor built in, or they need each other.
    """
    by_name = {module_name(path): path for path in dependencies}
    order: list[str] = []
    under_way: set[str] = set()
    for name in names:
        if name in built_in:
            continue
        if name not in by_name:
            raise BuildError(f"the kernel has no module {name}", module=name)
        _visit(by_name[name], dependencies.__getitem__, order, under_way)
    return order


def _visit(
    path: str,
    needs: Callable[[str], tuple[str, ...]],
    order: list[str],
    under_way: set[str],
) -> None:
    if path in order:
        return
    if path in under_way:
        raise BuildError(f"modules.dep leads in a circle at {path}", module=path)
    under_way.add(path)
    try:
        for needed in needs(path):
            _visit(needed, needs, order, under_way)
    except KeyError as error:
        raise BuildError(f"modules.dep lacks what {path} needs", module=path) from error
    order.append(path)


def module_name(path: str) -> str:
    """Return a module's name: its file's, without suffixes, and with `_` for `-`."""
    return PurePosixPath(path).name.partition(".ko")[0].replace("-", "_")


def built_in_modules(folder: Path) -> frozenset[str]:
    """Return the names of the modules that a kernel has built in."""
    table = folder / "modules.builtin"
    lines = files.read_all(table).decode().splitlines() if files.is_there(table) else []
    return frozenset(module_name(line) for line in lines)


def _file_name(path: str) -> str:
    name = PurePosixPath(path)
    return name.stem if name.suffix in SUFFIXES else name.name


def _read_agent(path: Path) -> bytes:
    try:
        data = files.read(path, AGENT_BYTES_MAX + 1)
    except HostError as error:
        raise BuildError(f"the agent is unusable: {error}", path=str(path)) from error
    if data is None:
        raise BuildError(f"no agent at {path}", path=str(path))
    if len(data) > AGENT_BYTES_MAX:
        raise BuildError(f"the agent {path} is larger than {AGENT_BYTES_MAX} bytes")
    if (wrong := _why_not_static(data)) is not None:
        raise BuildError(f"{path} cannot be the agent: {wrong}", path=str(path))
    return data


def _why_not_static(data: bytes) -> str | None:
    """Say why a program cannot run where there are no libraries; None if it can."""
    if not data.startswith(b"\x7fELF\x02"):
        return "it is not a 64-bit ELF program"
    program_headers = int.from_bytes(data[32:40], "little")
    size, count = (int.from_bytes(data[at : at + 2], "little") for at in (54, 56))
    interpreter = 3
    kinds = (program_headers + size * index for index in range(count))
    if any(int.from_bytes(data[at : at + 4], "little") == interpreter for at in kinds):
        return "it is linked dynamically"
    return None
