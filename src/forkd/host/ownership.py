"""Files and folders that are given to another user, and taken back.

What a user who may be hostile has had is taken back without following links, and only as long as it
is what it was to be: regular files of one name each.  Only root can give anything away.

Every function blocks, and raises what the kernel refuses as `CapacityError` or `HostError`.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import HostError
from forkd.host.faults import kernel_call
from forkd.host.files import PRIVATE, remove_tree

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_MODE = 0o600

SUBORDINATE = (Path("/etc/subuid"), Path("/etc/subgid"))
"""Ranges that users of the host have for their containers: subuid(5)."""


def taken() -> Iterator[tuple[str, int, int]]:
    """Yield what this host's numbers are taken for: a name, the first, how many."""
    for user in pwd.getpwall():
        yield f"user {user.pw_name}", user.pw_uid, 1
        yield f"the group of user {user.pw_name}", user.pw_gid, 1
    for group in grp.getgrall():
        yield f"group {group.gr_name}", group.gr_gid, 1
    for path in SUBORDINATE:
        with kernel_call(f"read {path}"):
            lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            name, _, rest = line.partition(":")
            first, _, count = rest.partition(":")
            if first.isdecimal() and count.isdecimal():
                yield f"the range of {name} in {path}", int(first), int(count)


def owner(path: Path) -> int:
    """Return whose a file is."""
    with kernel_call(f"look at {path}"):
        return path.lstat().st_uid


def give(path: Path, uid: int | None) -> None:
    """Give a file or an empty folder to a user, and to the group of that number; None: to nobody.

    Its permissions stay.
    """
    if uid is not None:
        with kernel_call(f"give {path} to user {uid}"):
            os.chown(path, uid, uid, follow_symlinks=False)


def share(folder: Path, group: int, mode: int) -> None:
    """Let a group into a folder of ours, as far as a mode says."""
    with kernel_call(f"let group {group} into {folder}"):
        opened = os.open(folder, _FOLDER)
        try:
            os.fchown(opened, -1, group)
            os.fchmod(opened, mode)
        finally:
            os.close(opened)


def take_back(folder: Path) -> None:
    """Make a folder ours again, with the files that are in it.

    Raises:
        HostError: There is something in it that is no file of its own.
    """
    uid, gid = os.geteuid(), os.getegid()
    with kernel_call(f"take {folder} back"):
        opened = os.open(folder, _FOLDER)
        try:
            # First, so that whoever had it changes no name in it any more.
            os.fchown(opened, uid, gid)
            os.fchmod(opened, PRIVATE)
            for entry in tuple(folder.iterdir()):
                _take_file(opened, entry, (uid, gid))
        finally:
            os.close(opened)


def take_tree_back(folder: Path) -> None:
    """Make a folder ours again, with the folders in it, and with the files that are in these.

    Raises:
        HostError: There is something in one of them that is no file of its own.
    """
    with kernel_call(f"take {folder} back"):
        opened = os.open(folder, _FOLDER)
        try:
            os.fchown(opened, os.geteuid(), os.getegid())
            inner = [each for each in folder.iterdir() if stat.S_ISDIR(each.lstat().st_mode)]
            for each in folder.iterdir():
                if each not in inner:
                    _take_file(opened, each, (os.geteuid(), os.getegid()))
        finally:
            os.close(opened)
    for each in inner:
        take_back(each)


def remove_of(folder: Path, users: Container[int]) -> list[str]:
    """Remove what some users have in a folder; return what that was called.

    What is gone meanwhile is fine.
    """
    removed = []
    with kernel_call(f"look at {folder}"), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_uid in users:
                    removed.append(entry.name)
    for name in removed:
        remove_tree(folder / name)
    return removed


def take_file(path: Path) -> None:
    """Make one file ours again, in a folder in which nobody can put another in its place any more.

    Raises:
        HostError: It is no file of its own.
    """
    with kernel_call(f"take {path} back"):
        opened = os.open(path.parent, _FOLDER)
        try:
            _take_file(opened, path, (os.geteuid(), os.getegid()))
        finally:
            os.close(opened)


def _take_file(folder: int, path: Path, ours: tuple[int, int]) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise HostError(f"{path} is no file of its own", path=str(path))
    file = os.open(path.name, flags, dir_fd=folder)
    try:
        # Nobody but us can have put another there since.
        os.fchown(file, *ours)
        os.fchmod(file, _FILE_MODE)
    finally:
        os.close(file)
