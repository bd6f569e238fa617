"""Choose what of the host's own files the helper machine sees: its programs, and no user's files.

The helper machine runs the host's programs over a shared file system.  Whoever takes it over sees
all that is shared, so that is little: the folders of the system's programs, copies of those files
of `/etc` that programs read and every user of the host may read, and the Python that we run with.
Homes, `/var`, keys and passwords are not there.

The root of the machine is a small folder that is made for each start (`stage`); the system's
folders are mounted into it.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

SYSTEM_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Where a Linux system has its programs; most of these are links into `usr` today."""

ETC = (
    "alternatives", "apt/apt.conf.d", "apt/keyrings", "apt/preferences.d", "apt/sources.list",
    "apt/sources.list.d", "apt/trusted.gpg", "apt/trusted.gpg.d", "ca-certificates/extracted",
    "debian_version", "dpkg", "ethertypes", "group", "iproute2", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "login.defs", "mke2fs.conf", "nsswitch.conf", "os-release",
    "passwd", "pip.conf", "pki/ca-trust/extracted", "pki/tls/certs", "protocols", "rpc", "services",
    "ssl/certs", "ssl/openssl.cnf",
)  # fmt: skip
"""What programs read, below `/etc`; what is not readable to every user is left out."""

EMPTY_FOLDERS = (
    "dev", "etc", "home", "media", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp", "var",
    "var/cache", "var/lib", "var/log", "var/tmp",
)  # fmt: skip

HOSTS = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"


USR = Path("/usr")
"""Where a distribution has its own Python."""


def python_folders() -> set[Path]:
    """Return the folders of Python and of our own source, but for what is below `/usr`."""
    prefixes = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    folders = {Path(__file__).resolve().parents[2], *prefixes}
    return {each for each in folders if not each.is_relative_to(USR)}


def outermost(folders: set[Path]) -> list[Path]:
    """Return the folders that are in no other, sorted."""
    inside = {each for each in folders for other in folders - {each} if each.is_relative_to(other)}
    return sorted(folders - inside)


def stage(root: Path, host: Path = Path("/")) -> tuple[Path, ...]:
    """Make the root of a machine, and return the folders of the host to be mounted into it.

    Args:
        root: The folder; made anew.
        host: The root of the host.

    Raises:
        OSError: It cannot be made.
    """
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(mode=0o755)
    for name in EMPTY_FOLDERS:
        (root / name).mkdir()
    (root / "var" / "tmp").chmod(0o1777)
    (root / "var" / "run").symlink_to("/run")
    (root / "var" / "lock").symlink_to("/run/lock")
    (root / "etc" / "hosts").write_text(HOSTS, encoding="utf-8")
    for name in ETC:
        _copy(host / "etc" / name, root / "etc" / name)
    folders = []
    for name in SYSTEM_FOLDERS:
        path = host / name
        if path.is_symlink():
            (root / name).symlink_to(path.readlink())
        elif path.is_dir():
            (root / name).mkdir()
            folders.append(path)
    return tuple(folders)


def _copy(source: Path, target: Path) -> None:
    """Copy what every user may read; links stay links, anything else is left out."""
    try:
        found = source.lstat()
    except FileNotFoundError:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(found.st_mode):
        target.symlink_to(source.readlink())
    elif stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IROTH:
        target.mkdir(exist_ok=True)
        for each in os.listdir(source):  # noqa: PTH208 - names of a folder we may not be able to list
            _copy(source / each, target / each)
    elif stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IROTH:
        shutil.copyfile(source, target)
        shutil.copymode(source, target)
