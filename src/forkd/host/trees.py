"""Write a root file system that somebody else has described, and nothing beside it.

A file is written into a pool of numbers first, and gets its path when it is known that it stays.
The paths are those of a tree: each has folders above it that were made here, and no link.  So no
path leads out of the root, whatever links are in it.

Owners are given as they are said, so this runs as root, of the host or of a user namespace.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forkd.errors import HostError
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_NOBODY_HERE = (errno.EINVAL, errno.EPERM)


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a file has besides its contents.

    Attributes:
        mode: Permissions, with set-uid, set-gid and sticky bits.
        uid: Its user.
        gid: Its group.
        mtime_ns: When it was changed, in nanoseconds since 1970.
        xattrs: Extended attributes, with their names; of files and folders only.
    """

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in a root file system.

    Attributes:
        path: Where it is, relative to the root; empty for the root itself.
        attributes: What it has besides its contents; None for another name of `same_as`.
        number: Of a file, in the pool.
        target: Where a symbolic link leads.
        node: Kind and numbers of a device or a FIFO, as of mknod.
        same_as: A path before this one that is the same file.
    """

    path: str
    attributes: Attributes | None
    number: int | None = None
    target: str | None = None
    node: tuple[int, int, int] | None = None
    same_as: str | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in a file.

    Attributes:
        pieces: Its data.
        size: How long it is, holes included.
        extents: Where its data is, each with offset and length; None for all in one piece.
    """

    pieces: Iterator[bytes]
    size: int
    extents: Sequence[tuple[int, int]] | None = None


class Pool:
    """Files that have no path yet.

    Args:
        folder: Where they are; is made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        with kernel_call(f"make the folder {folder}"):
            os.mkdir(folder, _PRIVATE_FOLDER)  # noqa: PTH102 - a million times, see below

    def path(self, number: int) -> str:
        """Return where a file is."""
        return f"{self._folder}/{number:x}"

    def write(
        self,
        number: int,
        name: str,
        attributes: Attributes,
        contents: Contents,
    ) -> int:
        """Write a file; return how many bytes of it came.

        Args:
            number: Its number, which no other has.
            name: What it is called in errors.
            attributes: What it has besides its contents.
            contents: Its data.
        """
        with kernel_call(f"write {name!r}"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path(number), flags, _PRIVATE_FILE)
            try:
                length = _fill(descriptor, contents)
                _dress(descriptor, name, attributes)
            finally:
                os.close(descriptor)
        return length

    def remove(self) -> None:
        """Remove the files that have no path."""
        with kernel_call(f"remove {self._folder}"):
            shutil.rmtree(self._folder)


def _fill(descriptor: int, contents: Contents) -> int:
    pieces, length = contents.pieces, 0
    if contents.extents is None:
        for piece in pieces:
            length += _write_all(descriptor, piece, length)
        return length
    rest = b""
    for offset, wanted in contents.extents:
        done = 0
        while done < wanted and (rest := rest or next(pieces, b"")):
            now, rest = rest[: wanted - done], rest[wanted - done :]
            done += _write_all(descriptor, now, offset + done)
        length += done
    os.ftruncate(descriptor, contents.size)
    return length


def _write_all(descriptor: int, data: bytes, offset: int) -> int:
    done = os.pwrite(descriptor, data, offset)
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
    return len(data)


def plant(root: Path, pool: Pool, entries: Iterable[Entry]) -> None:
    """Make a root file system.

    Args:
        root: A new folder for it.
        pool: Its files, which are moved.
        entries: All that is in it: the root itself, then each folder before what is in it.

    Raises:
        HostError: The kernel refuses one, which is named.
    """
    top = str(root)
    folders: list[Entry] = []
    for entry in entries:
        with kernel_call(f"write {(entry.path or '/')!r}"):
            _plant(top, pool, entry, folders)
    for entry in reversed(folders):  # what is made in a folder changes its time
        assert entry.attributes is not None  # noqa: S101 - it is a folder
        with kernel_call(f"write {(entry.path or '/')!r}"):
            _dress(f"{top}/{entry.path}", entry.path or "/", entry.attributes)


def _plant(top: str, pool: Pool, entry: Entry, folders: list[Entry]) -> None:
    path, attributes = f"{top}/{entry.path}", entry.attributes
    if entry.same_as is not None or attributes is None:
        os.link(f"{top}/{entry.same_as}", path, follow_symlinks=False)
    elif entry.number is not None:
        os.rename(pool.path(entry.number), path)  # noqa: PTH104 - of a string
    elif entry.target is not None:
        os.symlink(entry.target, path)  # noqa: PTH211 - of a string
        _own(path, entry.path, attributes)
        os.utime(path, ns=(attributes.mtime_ns,) * 2, follow_symlinks=False)
    elif entry.node is not None:
        kind, major, minor = entry.node
        try:
            os.mknod(path, kind | _PRIVATE_FILE, os.makedev(major, minor))
        except PermissionError:  # root of a user namespace makes no devices
            os.mknod(path, stat.S_IFREG | _PRIVATE_FILE)
        _dress(path, entry.path, replace(attributes, xattrs=()))
    else:
        os.mkdir(path, _PRIVATE_FOLDER)  # noqa: PTH102 - of a string
        folders.append(entry)


def _dress(where: int | str, name: str, attributes: Attributes) -> None:
    """Give a file, a folder or a node what it has besides its contents; it is no link."""
    _own(where, name, attributes)  # takes set-uid bits and capabilities away
    os.chmod(where, attributes.mode)  # noqa: PTH101 - of a descriptor
    for key, value in attributes.xattrs:
        try:
            os.setxattr(where, key, value)
        except OSError as error:
            if error.errno != errno.ENOTSUP:  # a file system that has none of that kind
                raise
    os.utime(where, ns=(attributes.mtime_ns,) * 2)


def _own(where: int | str, name: str, attributes: Attributes) -> None:
    try:
        if isinstance(where, int):
            os.fchown(where, attributes.uid, attributes.gid)
        else:
            os.lchown(where, attributes.uid, attributes.gid)
    except OSError as error:
        if error.errno not in _NOBODY_HERE:
            raise
        raise HostError(
            f"{name!r} belongs to user {attributes.uid} and group {attributes.gid}, and a build "
            "that is not root of the host has no such numbers"
        ) from error
