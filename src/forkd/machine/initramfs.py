"""Build the initramfs that takes the helper machine to the host's own files.

It holds busybox, the two stages of init, the kernel modules they need in the
order in which they load, and the configuration of this one start.  It is made
anew for each start (some milliseconds), so nothing in it can be stale.

The archive is cpio in its "newc" form, uncompressed: under emulation reading
three megabytes costs less than unpacking one.
"""

from __future__ import annotations

import lzma
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

BOOT_MODULES = ("virtio_pci", "virtio_blk", "virtio_net", "virtio-rng", "9p", "9pnet_virtio",
                "overlay", "ext4", "crc32c_generic")  # fmt: skip
"""What the two stages need before they can reach the other modules."""

NOT_IN_ALL = ("crc32c_generic",)
"""Of these, what a kernel may lack: since Linux 6.15 ext4 calls crc32c as a library."""

BUSYBOX_PATHS = ("/bin/busybox", "/usr/bin/busybox")
"""Where Debian's busybox-static puts it."""

APPLETS = ("sh", "mount", "insmod", "mkdir", "cp", "switch_root", "sync", "poweroff", "echo")


def build_initramfs(modules: Path, files: Mapping[str, bytes]) -> bytes:
    """Return the archive: busybox, both stages, modules in order, and `files`.

    Args:
        modules: Folder of the kernel's modules, with `modules.dep`.
        files: Further members by their path, such as `machine.conf`.

    Raises:
        HostError: busybox or a module is missing.
    """
    here = Path(__file__).parent
    table = (modules / "modules.dep").read_text(encoding="utf-8")
    order = load_order(table, BOOT_MODULES, built_in_modules(modules))
    archive = Archive()
    for folder in ("bin", "proc", "sys", "dev", "modules"):
        archive.folder(folder)
    archive.file("bin/busybox", busybox().read_bytes(), mode=0o755)
    for applet in APPLETS:
        archive.link(f"bin/{applet}", "busybox")
    archive.file("init", (here / "init.sh").read_bytes(), mode=0o755)
    archive.file("second.sh", (here / "second.sh").read_bytes(), mode=0o755)
    names = [Path(path).name.removesuffix(".xz") for path in order]
    for path, name in zip(order, names, strict=True):
        archive.file(f"modules/{name}", read_module(modules / path))
    archive.file("modules/order", "".join(f"{name}\n" for name in names).encode())
    for path, data in files.items():
        archive.file(path, data, mode=0o600)
    return archive.finish()


def load_order(
    modules_dep: str, wanted: Iterable[str], built_in: Iterable[str] = NOT_IN_ALL
) -> list[str]:
    """Return the paths of `wanted` and all they depend on, dependencies first.

    Args:
        modules_dep: Text of depmod's `modules.dep`.
        wanted: Names as modprobe takes them; `-` and `_` are the same.
        built_in: Names of what the kernel does not need as modules.

    Raises:
        HostError: A module is not listed, and every kernel has it.
    """
    needs: dict[str, tuple[str, list[str]]] = {}
    for line in modules_dep.splitlines():
        path, _, dependencies = line.partition(":")
        needs[_module_name(path)] = (path, dependencies.split())
    order: list[str] = []

    def add(name: str) -> None:
        if name not in needs:
            raise HostError(f"the kernel has no module {name}")
        path, dependencies = needs[name]
        for dependency in dependencies:
            add(_module_name(dependency))
        if path not in order:
            order.append(path)

    for module in wanted:
        name = _module_name(module)
        if name in needs or name not in built_in:
            add(name)
    return order


def _module_name(path: str) -> str:
    return Path(path).name.partition(".ko")[0].replace("-", "_")


def built_in_modules(modules: Path) -> frozenset[str]:
    """Return what a kernel with the folder `modules` does not need as modules."""
    table = modules / "modules.builtin"
    lines = table.read_text(encoding="utf-8").splitlines() if table.is_file() else []
    return frozenset((*map(_module_name, lines), *NOT_IN_ALL))


def read_module(path: Path) -> bytes:
    """Return a module as the kernel takes it, which may unpack no xz."""
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def busybox() -> Path:
    """Return this host's busybox.

    Raises:
        HostError: It has none.
    """
    for path in map(Path, BUSYBOX_PATHS):
        if path.is_file():
            return path
    raise HostError("busybox is missing; install the Debian package busybox-static")


class Archive:
    """A cpio archive in its "newc" form, owned by root, without times."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._inode = 0

    def folder(self, path: str) -> None:
        """Add an empty folder."""
        self._member(path, stat.S_IFDIR | 0o755, b"")

    def file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Add a file."""
        self._member(path, stat.S_IFREG | mode, data)

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link."""
        self._member(path, stat.S_IFLNK | 0o777, target.encode())

    def finish(self) -> bytes:
        """Return the archive, ended by its trailer."""
        self._member("TRAILER!!!", 0, b"")
        return bytes(self._data)

    def _member(self, path: str, mode: int, data: bytes) -> None:
        self._inode += 1
        name = path.encode() + b"\0"
        fields = (self._inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0)
        self._data += b"070701" + b"".join(b"%08X" % field for field in fields) + name
        self._pad()
        self._data += data
        self._pad()

    def _pad(self) -> None:
        self._data += bytes(-len(self._data) % 4)
