"""Find the guest's kernel: Debian's own, fetched and unpacked, or any that is given by path.

Debian's generic kernel comes as packages that `apt-get download` fetches, without root and
without installing anything.  It is unpacked into the cache once; `depmod` writes the table of
which module needs which.  The newest kernel in the cache is used as long as there is one:
deleting `kernels/` in the cache makes the next build fetch anew.

A kernel by path must be what the VMM can load: a bzImage, or a 64-bit x86 ELF vmlinux.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.host import files, folders, process
from forkd.images.kernel_packages import parse_dependency, parse_parts, unpack

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.images.layout import Cache
    from forkd.images.steps import Build

DEBIAN_META_PACKAGE = "linux-image-amd64"
"""The generic flavour: it has VMGENID and everything a server needs, as modules."""

APT_TIMEOUT_S = 900.0

_BZIMAGE_MAGIC_OFFSET = 0x202
_BOOT_PROTOCOL_MIN = 0x020C
"""The first that says whether the kernel can be entered in 64-bit mode (Linux 3.8)."""
_ELF_CLASS_64 = 2
_ELF_MACHINE_X86_64 = 62
_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that can be booted.

    Attributes:
        version: Names it in the cache; `custom` for one given by path.
        vmlinuz: The bzImage or vmlinux.
        modules: Folder like `/lib/modules/<release>`; None if it has none.
    """

    version: str
    vmlinuz: Path
    modules: Path | None


def debian_kernel(cache: Cache, build: Build) -> Kernel:
    """Return Debian's kernel from the cache, fetching it if there is none.

    Raises:
        BuildError: This host's apt does not know the package, or it could not be fetched.
    """
    with cache.lock("kernel", build.waiting("kernel", "waiting for another builder's kernel")):
        if (cached := newest_cached(cache)) is not None:
            build.tell("kernel", f"Debian kernel {cached.version}, from the cache", 1.0)
            return cached
        release, version = _resolve(build)
        path = cache.kernels / f"{release}_{version}"
        with cache.partial(path) as aside:
            _fetch(aside, release, version, build)
            files.publish(aside, path)
        build.tell("kernel", f"Debian kernel {path.name}", 1.0)
        return _cached(path)


def newest_cached(cache: Cache) -> Kernel | None:
    """Return the newest of Debian's kernels in the cache, or None."""
    found = [path.parent for path in folders.matching(cache.kernels, "[!.]*/vmlinuz")]
    return _cached(max(found, key=lambda path: _natural(path.name))) if found else None


def given_kernel(path: Path, modules: Path | None) -> Kernel:
    """Return the kernel in the file `path`.

    Raises:
        BuildError: There is none, it is no kernel, or `modules` has no `modules.dep`.
    """
    head = files.read(path, _HEAD_BYTES)
    if head is None:
        raise BuildError(f"no kernel at {path}", path=str(path))
    if (wrong := why_no_kernel(head)) is not None:
        raise BuildError(f"{path} is no kernel: {wrong}", path=str(path))
    if modules is not None and not files.is_file(modules / "modules.dep"):
        raise BuildError(f"no modules.dep in {modules}; run depmod", path=str(modules))
    return Kernel("custom", path, modules)


def why_no_kernel(head: bytes) -> str | None:
    """Say why a file that begins with `head` cannot be booted; None if it can."""
    if head.startswith(b"\x7fELF"):
        if len(head) < struct.calcsize("<16sHH"):
            return "its ELF header is cut short"
        ident, _, machine = struct.unpack_from("<16sHH", head)
        if ident[4] != _ELF_CLASS_64 or machine != _ELF_MACHINE_X86_64:
            return "it is an ELF file, but not for 64-bit x86"
        return None
    if head[_BZIMAGE_MAGIC_OFFSET : _BZIMAGE_MAGIC_OFFSET + 4] != b"HdrS":
        return "it is neither a bzImage nor an ELF vmlinux"
    (protocol,) = struct.unpack_from("<H", head, _BZIMAGE_MAGIC_OFFSET + 4)
    if protocol < _BOOT_PROTOCOL_MIN:
        return f"it speaks boot protocol {protocol >> 8}.{protocol & 0xFF:02}, older than 2.12"
    return None


def _resolve(build: Build) -> tuple[str, str]:
    if not process.installed("apt-get"):
        raise BuildError("no Debian kernel without apt; name one with machine.kernel = 'path'")
    build.tell("kernel", f"asking apt for {DEBIAN_META_PACKAGE}", 0.0)
    try:
        shown = build.run(
            ["apt-cache", "show", "--no-all-versions", DEBIAN_META_PACKAGE], timeout_s=APT_TIMEOUT_S
        )
    except BuildError as error:
        raise BuildError(_no_package(), **error.context) from error
    found = parse_dependency(shown.stdout.decode(errors="replace"))
    if found is None:
        raise BuildError(_no_package())
    return found


def _no_package() -> str:
    return (
        f"apt does not know {DEBIAN_META_PACKAGE}: run `apt-get update`, or, if this is not "
        "Debian, name a kernel with machine.kernel = 'path'"
    )


def _fetch(aside: Path, release: str, version: str, build: Build) -> None:
    """Unpack the kernel's packages into `aside` as the layout says."""
    build.tell("kernel", f"fetching Debian kernel {release}", 0.1)
    image = f"linux-image-{release}"
    shown = build.run(["apt-cache", "show", f"{image}={version}"], timeout_s=APT_TIMEOUT_S)
    parts = parse_parts(shown.stdout.decode(errors="replace"), release)
    packages = [f"{name}={version}" for name in (image, *parts)]
    build.run(
        ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *packages],
        timeout_s=APT_TIMEOUT_S,
        cwd=aside,
    )
    archives = folders.matching(aside, "*.deb")
    build.tell("kernel", f"unpacking Debian kernel {release}", 0.5)
    unpack(archives, release, aside, build)
    about = {"release": release, "version": version}
    folders.write(aside / "kernel.json", f"{json.dumps(about)}\n".encode())
    for archive in archives:
        files.remove_file(archive)


def _cached(path: Path) -> Kernel:
    return Kernel(path.name, path / "vmlinuz", path / "modules")


def _natural(name: str) -> list[tuple[int, str]]:
    """Order versions as people do: 6.1.0-9 before 6.1.0-56."""
    return [(int(number or -1), text) for number, text in re.findall(r"(\d+)|(\D+)", name)]
