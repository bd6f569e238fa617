"""Files that are whole or absent, locks, and trees that go away.

The rules that a caller may rely on: what `write_atomic` and `publish` put under a name
is complete and survives a power cut, or is not there; a `lock` is given back when its
holder ends, however it ends; `remove_tree` never follows a symbolic link.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FICLONE = 0x40049409
"""ioctl that makes one file share another's blocks (linux/fs.h)."""

_COPY_BYTES = 64 * 1024 * 1024

ASIDE_SUFFIX = ".gone"
"""Ends the name of a folder that is being removed."""


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Put `data` under `path`, whole or not at all, and on disk before returning.

    Raises:
        OSError: The folder is missing, not writable or full; nothing was left in it.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    aside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def publish(aside: Path, path: Path) -> None:
    """Give the finished folder `aside` its name `path`, with all that is in it on disk.

    Both must be on one file system, and `path` must not exist or be an empty folder.
    """
    sync_file_system(aside)
    aside.rename(path)
    sync_folder(path.parent)


def sync_file_system(path: Path) -> None:
    """Have everything on the file system of `path` on disk.

    One call where a tree of thousands of files would need an fsync each.

    Raises:
        OSError: Something could not be written.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hides_holes(path: Path) -> bool:
    """Tell whether a file has holes that its file system does not show, as 9p does."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_blocks * 512 >= status.st_size:
            return False
        return os.lseek(file.fileno(), 0, os.SEEK_HOLE) == status.st_size


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file, sharing its blocks where the file system can, keeping its holes.

    Raises:
        OSError: `target` exists already, or there is no room.
    """
    with source.open("rb") as reader, target.open("xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:
            _copy_ranges(reader.fileno(), writer.fileno())


def _copy_ranges(reader: int, writer: int) -> None:
    size = os.fstat(reader).st_size
    os.truncate(writer, size)
    position = 0
    while position < size:
        try:
            start = os.lseek(reader, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # only a hole is left
            raise
        end = os.lseek(reader, start, os.SEEK_HOLE)
        os.lseek(reader, start, os.SEEK_SET)
        os.lseek(writer, start, os.SEEK_SET)
        while (left := end - os.lseek(reader, 0, os.SEEK_CUR)) > 0:
            if os.sendfile(writer, reader, None, min(left, _COPY_BYTES)) == 0:
                raise HostError("a file shrank while it was copied")
        position = end


@contextlib.contextmanager
def lock(path: Path, *, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file `path`, waiting for whoever holds it.

    The file stays; only its lock goes when the block or the process ends.

    Args:
        path: Made if it is missing.
        wait: Called between two attempts; it waits as long as it likes, and gives up by
            raising.  Without it the kernel wakes us, and nothing can end the wait.
    """
    with _lock_file(path) as descriptor:
        while wait is not None and not _locked_now(descriptor):
            wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Hold the lock file `path` if nobody else does; the block is told whether."""
    with _lock_file(path) as descriptor:
        yield _locked_now(descriptor)


def _locked_now(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def tree_bytes(path: Path) -> int:
    """Return what a file, or all in a folder, takes on disk; links are not followed."""
    total = path.lstat().st_blocks * 512
    if path.is_dir() and not path.is_symlink():
        for entry in path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                total += entry.lstat().st_blocks * 512
    return total


def remove_tree(path: Path) -> None:
    """Remove a file or a whole folder; what is missing already is no error.

    Raises:
        OSError: Something in it could not be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=_ignore_missing)
    else:
        path.unlink(missing_ok=True)


def remove_from_under(folder: Path) -> None:
    """Remove a folder in which a process that is about to end may still make files.

    It gets another name first, so that nothing can be made in it by its path any more.

    Raises:
        OSError: Something in it could not be removed.
    """
    aside = folder.with_name(f"{folder.name}{ASIDE_SUFFIX}")
    with contextlib.suppress(FileNotFoundError):  # it is gone, or was put aside before
        folder.rename(aside)
    remove_tree(aside)


def _ignore_missing(_: object, __: str, details: tuple[object, BaseException, object]) -> None:
    if not isinstance(details[1], FileNotFoundError):
        raise details[1]
