"""Find the guest's kernel: Debian's own, fetched and unpacked, or any that is given by path.

Debian's generic kernel comes as packages, which are fetched without root and without installing
anything, on any distribution (`forkd.images.debian_archive`).  It is unpacked into the cache once;
`depmod` writes the table of which module needs which.  The newest kernel in the cache is used as
long as there is one: deleting `kernels/` in the cache makes the next build fetch anew.

Which one is the host's release's, unless a *series* is named: the first numbers of its version,
such as `6.12` or `7`.  A host that is no such release of Debian has that of Debian 12.  See
docs/adr/0057 and docs/adr/0070.

A kernel by path must be what the VMM can load: a bzImage, or a 64-bit x86 ELF vmlinux.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import BuildError, InvalidRequest
from forkd.host import files, folders, proc
from forkd.images.kernel_packages import parse_dependency, parse_parts, unpack
from forkd.images.mirrors import RELEASES, find_mirrors, release_of_host, suites_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forkd.images.debian_archive import Archive, Package
    from forkd.images.layout import Cache
    from forkd.images.steps import Build

DEBIAN_META_PACKAGE = "linux-image-amd64"
"""The generic flavour: it has VMGENID and everything a server needs, as modules."""

SERIES = re.compile(r"[1-9][0-9]?(\.[0-9]{1,3}){0,2}")
"""What names the kernels of a series; a file of such a name is named with a `./` before it."""

VARIABLE = "FORKD_KERNEL"
"""The environment variable that says which series `debian` means."""

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


def is_debian(named: str) -> bool:
    """Tell whether what a recipe names is a kernel of Debian's, not a path."""
    return named == "debian" or SERIES.fullmatch(named) is not None


def series_of(named: str) -> str | None:
    """Return the series of a kernel of Debian's that a recipe names; None for the host's release's.

    Raises:
        InvalidRequest: The variable that says what `debian` means names none.
    """
    if named != "debian":
        return named
    said = proc.environment().get(VARIABLE) or None
    if said is not None and SERIES.fullmatch(said) is None:
        raise InvalidRequest(
            f"{VARIABLE} is {said!r}: must be the beginning of a version of Linux, such as 6.12",
            field=VARIABLE,
        )
    return said


def debian_kernel(cache: Cache, build: Build, series: str | None = None) -> Kernel:
    """Return a kernel of Debian's from the cache, fetching it if there is none.

    Args:
        cache: Where it is kept.
        build: What needs it.
        series: The beginning of its version; None for that of this host's release.

    Raises:
        BuildError: There is none of that series, or it could not be fetched.
        InvalidRequest: A variable that names a mirror has no URL.
    """
    with cache.lock("kernel", build.waiting("kernel", "waiting for another builder's kernel")):
        if (cached := newest_cached(cache, series)) is not None:
            build.tell("kernel", f"Debian kernel {cached.version}, from the cache", 1.0)
            return cached
        with cache.partial(cache.kernels / "fetched") as aside:
            from forkd.images.debian_archive import Archive  # noqa: PLC0415 - loads httpx

            kernel = aside / "kernel"
            folders.make(kernel)
            with Archive(find_mirrors(), build) as archive:
                release, version, parts = _resolve(series, archive)
                _fetch(archive, kernel, release, version, parts, build)
            path = _folder(cache, series) / f"{release}_{version}"
            folders.make(path.parent)
            files.publish(kernel, path)
        build.tell("kernel", f"Debian kernel {path.name}", 1.0)
        return _cached(path)


def newest_cached(cache: Cache, series: str | None = None) -> Kernel | None:
    """Return the newest of Debian's kernels of a series in the cache, or None."""
    found = [path.parent for path in folders.matching(_folder(cache, series), "[!.]*/vmlinuz")]
    return _cached(max(found, key=lambda path: _natural(path.name))) if found else None


def _folder(cache: Cache, series: str | None) -> Path:
    return cache.kernels if series is None else cache.kernels / series


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


def _resolve(series: str | None, archive: Archive) -> tuple[str, str, list[Package]]:
    """Return the newest kernel of a series: its release, its version, and its packages."""
    releases = (release_of_host(),) if series is None else RELEASES
    found = [
        package
        for suite in suites_of(releases)
        for package in archive.packages(suite, _is_of_kernels)
    ]
    metas = [each.record for each in found if each.name == DEBIAN_META_PACKAGE]
    newest = newest_of(series, metas)
    if newest is None:
        raise BuildError(_no_series(series, metas))
    release, version = newest
    of_version = {each.name: each for each in found if each.version == version}
    image = f"linux-image-{release}"
    record = of_version[image].record if image in of_version else ""
    names = (image, *parse_parts(record, release))
    if missing := [name for name in names if name not in of_version]:
        raise BuildError(f"Debian has no {missing[0]} of version {version}: try again later")
    return release, version, [of_version[name] for name in names]


def _is_of_kernels(name: str) -> bool:
    return name == DEBIAN_META_PACKAGE or _PART.match(name) is not None


_PART = re.compile(r"linux-(?:image|base|binary|modules)-[0-9]")


def newest_of(series: str | None, records: Iterable[str]) -> tuple[str, str] | None:
    """Return release and version of the newest kernel of a series among records of the package."""
    known = [found for record in records if (found := parse_dependency(record)) is not None]
    if series is not None:
        known = [each for each in known if re.match(rf"{re.escape(series)}(?![0-9])", each[0])]
    return max(known, key=lambda each: _natural(each[1]), default=None)


def _no_series(series: str | None, records: Iterable[str]) -> str:
    known = {found[0] for record in records if (found := parse_dependency(record)) is not None}
    which = "" if series is None else f" {series}"
    return f"Debian has no kernel{which}; it has {', '.join(sorted(known, key=_natural)) or 'none'}"


def _fetch(  # noqa: PLR0913, PLR0917 - what it is made of, and where
    archive: Archive,
    aside: Path,
    release: str,
    version: str,
    parts: Iterable[Package],
    build: Build,
) -> None:
    """Unpack the kernel's packages into `aside` as the layout says."""
    build.tell("kernel", f"fetching Debian kernel {release}", 0.1)
    archives = [archive.download(part, aside) for part in parts]
    build.tell("kernel", f"unpacking Debian kernel {release}", 0.5)
    unpack(archives, release, aside, build)
    about = {
        "release": release,
        "version": version,
        "packages": {each.name: _sha256(each) for each in archives},
        "vmlinuz_sha256": _sha256(aside / "vmlinuz"),
    }
    folders.write(aside / "kernel.json", f"{json.dumps(about)}\n".encode())
    for each in archives:
        files.remove_file(each)


def _sha256(path: Path) -> str:
    with files.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cached(path: Path) -> Kernel:
    return Kernel(path.name, path / "vmlinuz", path / "modules")


def _natural(name: str) -> list[tuple[int, str]]:
    """Order versions as people do: 6.1.0-9 before 6.1.0-56."""
    return [(int(number or -1), text) for number, text in re.findall(r"(\d+)|(\D+)", name)]
