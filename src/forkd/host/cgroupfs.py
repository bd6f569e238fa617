"""The cgroup v2 file system: make a group, write its files, end it.

Nothing is swallowed: a limit that cannot be set is an error, so that no sandbox
runs without a limit that it was given.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from forkd.errors import HostError

CGROUP_ROOT = Path("/sys/fs/cgroup")
"""Where cgroup v2 is mounted on every host with systemd, and in the helper machine."""


def controllers(group: Path) -> frozenset[str]:
    """Return the controllers that `group` may pass on; empty where there is no cgroup v2."""
    try:
        return frozenset((group / "cgroup.controllers").read_text().split())
    except OSError:
        return frozenset()


def make(group: Path) -> None:
    """Make one group; one that exists is fine.

    Raises:
        HostError: The kernel refused.
    """
    try:
        group.mkdir(exist_ok=True)
    except OSError as error:
        raise HostError(f"cannot make the cgroup {group}: {error.strerror}") from error


def write(group: Path, file: str, value: str) -> None:
    """Write one file of a group.

    Raises:
        HostError: The kernel refused, or has no such file.
    """
    path = group / file
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, value.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise HostError(f"cannot set {path} to {value}: {error.strerror}") from error


def end(group: Path) -> None:
    """Kill every process in a group; one that does not exist is fine.

    Raises:
        HostError: The kernel refused.
    """
    if group.exists():
        write(group, "cgroup.kill", "1")


def remove(group: Path) -> bool:
    """Remove a group without processes; returns False while some still end in it.

    Raises:
        HostError: The kernel refused for another reason.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            group.rmdir()
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise HostError(f"cannot remove the cgroup {group}: {error.strerror}") from error
    return True


def children(group: Path) -> tuple[str, ...]:
    """Return the names of the groups directly in `group`; none if it does not exist."""
    try:
        with os.scandir(group) as entries:
            return tuple(sorted(entry.name for entry in entries if entry.is_dir()))
    except FileNotFoundError:
        return ()
