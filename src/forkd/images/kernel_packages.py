"""Make a bootable kernel of Debian's packages: find its parts, wherever a release puts them.

    Debian 12              boot/vmlinuz-R              lib/modules/R/
    Debian 13              boot/vmlinuz-R              usr/lib/modules/R/
    backports, Debian 14   usr/lib/modules/R/vmlinuz   usr/lib/modules/R/

R is the kernel's release.  In the last of these the package `linux-image-R` has no kernel: it
depends on `linux-binary-R`, which has it, on `linux-modules-R`, and on `linux-base-R`, which has
the list of what is built in.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.host import files, folders
from forkd.images import deb

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forkd.images.steps import Build

DEPMOD_TIMEOUT_S = 300.0


def parse_dependency(record: str) -> tuple[str, str] | None:
    """Return release and version of the kernel that a meta package's record depends on."""
    match = re.search(r"^Depends:.*?\blinux-image-(\S+) \(= ([^)\s]+)\)", record, re.MULTILINE)
    return (match[1], match[2]) if match else None


def parse_parts(record: str, release: str) -> tuple[str, ...]:
    """Return the packages that the record of `linux-image-RELEASE` says are parts of it."""
    depends = re.search(r"^Depends: (.*)$", record, re.MULTILINE)
    part = rf"\b(linux-(?:base|binary|modules)-{re.escape(release)}) \(= "
    return tuple(re.findall(part, depends[1])) if depends else ()


def unpack(archives: Iterable[Path], release: str, folder: Path, build: Build) -> None:
    """Make `folder/vmlinuz` and `folder/modules` of the packages in `archives`.

    Raises:
        BuildError: They have no kernel of that release, or no modules, or are damaged.
    """
    root, tree = folder / "root", folder / "depmod"
    folders.make(root)
    trees = (f"lib/modules/{release}", f"usr/lib/modules/{release}")
    for archive in archives:
        deb.unpack(archive, root, (f"boot/vmlinuz-{release}", *trees), build)
    modules = _first(root, trees, release)
    vmlinuz = _first(root, (f"boot/vmlinuz-{release}", f"{modules}/vmlinuz"), release)
    files.rename(root / vmlinuz, folder / "vmlinuz")
    # Where `depmod` looks for them, whatever this host's own layout is.
    staged = tree / "lib" / "modules" / release
    folders.make(staged.parent)
    files.rename(root / modules, staged)
    build.run(["depmod", "-b", tree, release], timeout_s=DEPMOD_TIMEOUT_S)
    files.rename(staged, folder / "modules")
    files.remove_tree(tree)
    files.remove_tree(root)


def _first(root: Path, places: tuple[str, ...], release: str) -> str:
    for place in places:
        if files.is_there(root / place):
            return place
    raise BuildError(
        f"the packages of Debian's kernel {release} have none of {', '.join(places)}",
        release=release,
    )
