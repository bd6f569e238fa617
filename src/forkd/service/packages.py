"""Which package of a distribution has a program that forkd needs: a table, and advice from it.

The names for apt are those that tests install from.  The others were written down without a host of
that distribution to try them on; where none is known, the advice says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MANAGERS = {
    "apt": "apt install",
    "dnf": "dnf install",
    "pacman": "pacman -S",
    "zypper": "zypper install",
    "apk": "apk add",
}
"""What installs a package, by the program that does."""


@dataclass(frozen=True, slots=True)
class Names:
    """The packages that have something; None where there is none that we know."""

    apt: str
    dnf: str | None
    pacman: str | None
    zypper: str | None
    apk: str | None


def _everywhere(name: str) -> Names:
    return Names(name, name, name, name, name)


PACKAGES = {
    "mke2fs": _everywhere("e2fsprogs"),
    "busybox": Names("busybox-static", "busybox", "busybox", "busybox-static", "busybox-static"),
    "depmod": _everywhere("kmod"),
    "mmdebstrap": Names("mmdebstrap", "mmdebstrap", None, None, None),
    "prlimit": Names("util-linux", "util-linux", "util-linux", "util-linux", "util-linux-misc"),
    "newuidmap": Names("uidmap", "shadow-utils", "shadow", "shadow", "shadow-subids"),
    "libnftables.so.1": Names("libnftables1", "nftables", "nftables", "libnftables1", "nftables"),
    "qemu-system-x86_64": Names(
        "qemu-system-x86",
        "qemu-system-x86",
        "qemu-system-x86",
        "qemu-x86",
        "qemu-system-x86_64",
    ),
}
"""By program, or library."""


def manager(installed: Callable[[str], bool]) -> str | None:
    """Return the program that installs packages on this host; None if it is none that we know."""
    return next((each for each in MANAGERS if installed(each)), None)


def advice(needed: Iterable[str], manager: str | None) -> str:
    """Return what installs programs on a host.

    Args:
        needed: Programs of the table.
        manager: What installs packages there; None if that is not known, which is told all names.
    """
    programs = list(needed)
    if manager is None:
        words = (each.apt for each in map(PACKAGES.__getitem__, programs))
        return f"no package manager that forkd knows is here; in Debian: {' '.join(words)}"
    names = {each: getattr(PACKAGES[each], manager) for each in programs}
    found = dict.fromkeys(name for name in names.values() if name is not None)
    lines = [f"{MANAGERS[manager]} {' '.join(found)}"] if found else []
    unknown = [each for each, name in names.items() if name is None]
    if unknown:
        lines.append(f"no package for {manager} is known that has {', '.join(unknown)}")
    return "; ".join(lines)
