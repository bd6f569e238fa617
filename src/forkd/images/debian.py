"""Build a root file system of Debian packages with mmdebstrap.

mmdebstrap is told which mirrors and keys to use (`forkd.images.mirrors`), so what this host's apt
knows makes no difference: packages are Debian's own on every distribution.

The result is a small, ordinary Debian: apt works in it.  Manual pages, translations and
documentation are left out, now and in what a child installs later; licences stay.  Python
packages arrive compiled, by their own maintainer scripts, so no child does it again.

mmdebstrap copies the host's resolver and host name into what it builds; those are blanked.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from forkd.host import files, folders, proc, process
from forkd.images.mirrors import KEYRING, SECURITY_SUFFIX, Mirrors, find_mirrors
from forkd.images.namespace import run_as_root
from forkd.images.rootfs import MOUNT_POINTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from forkd.images.recipe import DebianSource
    from forkd.images.steps import Build

DEBIAN_TIMEOUT_S = 3_600.0
UNPACK_TIMEOUT_S = 900.0

LEFT_OUT = (
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/lintian/*",
    "/usr/share/doc/*",
)
KEPT_AFTER_ALL = ("/usr/share/locale/locale.alias", "/usr/share/doc/*/copyright")

MANUAL_FOLDERS = 'mkdir -p "$1"/usr/share/man/man1 "$1"/usr/share/man/man7'
"""Packages with alternatives, such as Java's, make links in these, and fail where they are not."""

WITHOUT_UPDATES = ("sid", "unstable", "experimental")

GUEST_MIRRORS = Mirrors(security="http://security.debian.org/debian-security")
"""What apt in the image asks, whichever mirrors the image was made from."""

BLANKED = ("etc/hostname", "etc/resolv.conf", "etc/machine-id")
"""Files that say something of the host, or of one machine; the agent fills them in."""

REMOVED = (
    "var/log/apt/*",
    "var/log/*.log",
    "var/cache/ldconfig/aux-cache",
    "var/cache/debconf/*-old",
    "var/lib/dpkg/*-old",
    "var/lib/apt/extended_states.bak",
)

_STEPS = (
    ("running apt-get update", 0.05),
    ("downloading packages", 0.15),
    ("extracting archives", 0.35),
    ("installing essential", 0.45),
    ("installing remaining", 0.60),
    ("cleaning package lists", 0.85),
    ("creating tarball", 0.90),
)


def build_debian(
    source: DebianSource, folder: Path, build: Build, *, tools: Path | None = None
) -> None:
    """Make the existing empty `folder` a Debian root file system.

    Args:
        source: Which packages.
        folder: Where to.
        build: What it is a part of.
        tools: Programs that mmdebstrap finds before others of their name.

    Raises:
        BuildError: A package does not exist or does not install, or the mirror is out of reach
            or has something that Debian has not signed; the message ends with mmdebstrap's own
            words.
        InvalidRequest: A variable that names a mirror has no URL.
    """
    archive = folder.with_suffix(".tar")
    packages = source.packages
    build.tell("packages", f"Debian {source.suite} and {len(packages)} packages", 0.0)
    with files.scratch_folder("forkd-keys-") as keys:
        _bootstrap(source, archive, build, tools, _open_keyring(keys))
    unpack: list[str | Path] = [
        *("tar", "-x", "--numeric-owner", "--xattrs", "--xattrs-include=*"),
        *("--exclude=./dev/*", "-C", folder, "-f", archive),
    ]
    run_as_root(unpack, build, timeout_s=UNPACK_TIMEOUT_S)
    files.remove_file(archive)
    _clean(folder)
    folders.write(folder / "etc/apt/sources.list", _lines(sources_of(source.suite, GUEST_MIRRORS)))
    build.tell("packages", "packages installed", 1.0)


def _open_keyring(folder: Path) -> Path:
    """Put Debian's keys where apt may read them, which asks as a user without any rights."""
    keyring = folder / KEYRING.name
    folders.copy(KEYRING, keyring)
    for path, mode in ((folder, 0o755), (keyring, 0o644)):
        folders.set_mode(path, mode)
    return keyring


def _bootstrap(
    source: DebianSource, archive: Path, build: Build, tools: Path | None, keyring: Path
) -> None:
    """Have mmdebstrap make `archive` of packages that keys in `keyring` have signed."""
    mirrors, packages = find_mirrors(), source.packages
    args: list[str | Path] = [
        *("mmdebstrap", f"--mode={'root' if proc.is_root() else 'unshare'}", "--format=tar"),
        *(f"--variant={source.variant}", '--aptopt=Acquire::Languages "none"'),
        *(f"--dpkgopt=path-exclude={path}" for path in LEFT_OUT),
        *(f"--dpkgopt=path-include={path}" for path in KEPT_AFTER_ALL),
        f"--essential-hook={MANUAL_FOLDERS}",
        *((f"--include={','.join(packages)}", _found_early(packages)) if packages else ()),
        *(source.suite, archive),
        *sources_of(source.suite, mirrors, keyring),
    ]

    def on_line(line: str) -> None:
        for words, fraction in _STEPS:
            if words in line:
                build.tell("packages", line.removeprefix("I: "), fraction)

    environment = _environment(mirrors, tools)
    if proc.is_root():
        timeout_s = DEBIAN_TIMEOUT_S
        run_as_root(
            args, build, timeout_s=timeout_s, on_line=on_line, network=True, env=environment
        )
    else:  # mmdebstrap makes a user namespace of its own
        build.run(args, timeout_s=DEBIAN_TIMEOUT_S, on_line=on_line, env=environment)


def sources_of(suite: str, mirrors: Mirrors, keyring: Path | None = None) -> list[str]:
    """Return the lines of `sources.list` that have a suite, and its updates if it is a release.

    Args:
        suite: Which one.
        mirrors: Where it is.
        keyring: The only keys that are believed; None for those that the image has.
    """
    more = () if suite in WITHOUT_UPDATES else (f"{suite}-updates", f"{suite}{SECURITY_SUFFIX}")
    signed = "" if keyring is None else f"[signed-by={keyring}] "
    return [f"deb {signed}{mirrors.of(each)} {each} main" for each in (suite, *more)]


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _environment(mirrors: Mirrors, tools: Path | None) -> dict[str, str]:
    """Return the environment of mmdebstrap: how to reach mirrors, and which programs come first."""
    found = process.plain_environment()
    for scheme, proxy in mirrors.proxies.items():
        found.setdefault(f"{scheme}_proxy", proxy)
    if tools is not None:
        found["PATH"] = f"{tools}:{found['PATH']}"
    return found


def _found_early(packages: Iterable[str]) -> str:
    """Return the option by which packages that cannot be installed are found before any is.

    That is once the lists are there, and a minute before mmdebstrap would come to them.
    """
    install = f"apt-get --simulate --quiet install {' '.join(packages)}"
    return f'--extract-hook=APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" {install}'


def _clean(folder: Path) -> None:
    for pattern in REMOVED:
        for path in folders.matching(folder, pattern):
            files.remove_file(path)
    for name in BLANKED:
        files.remove_file(folder / name)  # which may be a link
        folders.write(folder / name, b"")
        folders.set_mode(folder / name, 0o644)
    for name in MOUNT_POINTS:
        folders.make(folder / name)


def installed_packages(folder: Path) -> dict[str, str]:
    """Return the version of each Debian package in a root file system; empty if it is none."""
    status = folder / "var" / "lib" / "dpkg" / "status"
    if folders.link_target(status) is not None or not files.is_file(status):
        return {}
    return dict(_packages(files.read_all(status).decode(errors="replace")))


def _packages(status: str) -> Iterator[tuple[str, str]]:
    for record in status.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Status): (.*)$", record, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            yield fields["Package"], fields["Version"]
