"""Files that are whole or absent, locks, and trees that go away.

The rules that a caller may rely on: what `write_atomic` and `publish` put under a name
is complete and survives a power cut, or is not there; a `lock` is given back when its
holder ends, however it ends; `remove_tree` never follows a symbolic link.

Every function blocks, and raises what the kernel refuses as `CapacityError` or `HostError`
(`forkd.host.faults`), naming the path; docstrings name only what else there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import ForkdError, HostError, InvalidRequest, NotFound
from forkd.host.faults import NO_FILE, kernel_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import BufferedReader

_FICLONE = 0x40049409
"""ioctl that makes one file share another's blocks (linux/fs.h)."""

_LIBC = ctypes.CDLL(None, use_errno=True)
"""For what Python's `os` lacks."""

_COPY_BYTES = 64 * 1024 * 1024

ASIDE_SUFFIX = ".gone"
"""Ends the name of a folder that is being removed."""

PRIVATE = 0o700
"""Mode of folders that nobody but their owner looks into."""


def make_folder(path: Path, *, parents: bool = False, exist_ok: bool = False) -> None:
    """Make a folder of mode `PRIVATE`."""
    with kernel_call(f"make the folder {path}"):
        path.mkdir(mode=PRIVATE, parents=parents, exist_ok=exist_ok)


def open_to_read(path: Path) -> int:
    """Return a descriptor of a file, which is the caller's to close."""
    with kernel_call(f"open {path}"):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def close(descriptor: int) -> None:
    """Close what `open_to_read` and its like have opened."""
    os.close(descriptor)


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Give a folder of our own that is removed after the block."""
    with kernel_call("make a temporary folder"):
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        remove_tree(folder)


def entries(folder: Path) -> tuple[Path, ...]:
    """Return what is in a folder, by name."""
    with kernel_call(f"list {folder}"):
        return tuple(sorted(folder.iterdir()))


def is_there(path: Path) -> bool:
    """Whether a path names anything, a broken symbolic link included."""
    with kernel_call(f"look at {path}"):
        try:
            path.lstat()
        except OSError as error:
            if error.errno in NO_FILE:
                return False
            raise
        return True


def is_folder(path: Path) -> bool:
    """Whether a path leads to a folder; one that no file can have leads to none."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Whether a path leads to a regular file; one that no file can have leads to none."""
    return stat.S_ISREG(_mode(path))


def _mode(path: Path) -> int:
    """Return the type and permissions of what a path leads to; 0 if that is nothing."""
    try:
        with kernel_call(f"look at {path}"):
            return _status(path).st_mode
    except NotFound:
        return 0


def real_path(path: Path) -> Path:
    """Return an absolute path with every symbolic link followed as far as there is anything.

    Raises:
        InvalidRequest: No file can have that path.
    """
    _check_path(path)
    with kernel_call(f"look at {path}"):
        return Path(os.path.realpath(path))


def read_regular(path: Path, bytes_max: int) -> bytes:
    """Return the first bytes of a regular file; never waits for a FIFO, never opens a device.

    Raises:
        NotFound: There is none.
        InvalidRequest: It is a folder, a FIFO, a device or a socket; or no file can have that path.
    """
    with kernel_call(f"read {path}"):
        _check_regular(path, _status(path).st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            _check_regular(path, os.fstat(file.fileno()).st_mode)  # it may be another by now
            return file.read(bytes_max)


def _status(path: Path) -> os.stat_result:
    _check_path(path)
    try:
        return path.stat()
    except OSError as error:
        if error.errno in NO_FILE:
            raise NotFound(f"no file at {path}: {error.strerror}", path=str(path)) from error
        raise


def _check_path(path: Path) -> None:
    if "\0" in str(path):
        raise InvalidRequest(f"a path must not hold a NUL: {str(path)[:80]!r}", field="path")


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise InvalidRequest(f"{path} is {kind}, not a regular file", path=str(path))


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def size_bytes(path: Path) -> int | None:
    """Return the length of a regular file; None if there is none."""
    with kernel_call(f"look at {path}"):
        return path.stat().st_size if path.is_file() else None


def read(path: Path, bytes_max: int) -> bytes | None:
    """Return the first bytes of a file; None if it does not exist."""
    with kernel_call(f"read {path}"):
        try:
            with path.open("rb") as file:
                return file.read(bytes_max)
        except FileNotFoundError:
            return None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Read a file within the block; what the kernel refuses in the block is raised as ours."""
    with kernel_call(f"read {path}"), path.open("rb") as file:
        yield file


def read_all(path: Path) -> bytes:
    """Return what is in a file, which is there and is ours."""
    with opened(path) as file:
        return file.read()


def read_start(path: Path, bytes_max: int) -> tuple[bytes, int] | None:
    """Return the first bytes of a file, and its length; None if it does not exist."""
    with kernel_call(f"read {path}"):
        try:
            with path.open("rb") as file:
                return file.read(bytes_max), os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return None


def read_with_mode(path: Path, bytes_max: int) -> tuple[bytes, int] | None:
    """Return the first bytes of a file, and its permission bits; None if it does not exist."""
    with kernel_call(f"read {path}"):
        try:
            with path.open("rb") as file:
                return file.read(bytes_max), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        except FileNotFoundError:
            return None


def read_foreign(path: Path, bytes_max: int, *, end: bool = False) -> bytes | None:
    """Return the first bytes of a file that another process keeps in a folder of ours, or the last.

    The process may be hostile, and the folder its own: nothing but a regular file in that very
    folder is read.  Links are not followed, and FIFOs not waited for.

    Returns:
        None if there is none.

    Raises:
        HostError: It is a link, a folder, a FIFO, a device or a socket.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with kernel_call(f"read {path}"), contextlib.ExitStack() as undo:
        try:
            folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            undo.callback(os.close, folder)
            file = undo.enter_context(os.fdopen(os.open(path.name, flags, dir_fd=folder), "rb"))
        except FileNotFoundError:
            return None
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "no file")
            raise HostError(f"cannot read {path}: it is {kind}, not a regular file")
        if end:
            file.seek(max(0, file.seek(0, os.SEEK_END) - bytes_max))
        return file.read(bytes_max)


def append(path: Path, data: bytes) -> None:
    """Write `data` to the end of a file, which is made if it does not exist."""
    with kernel_call(f"write {path}"), path.open("ab") as file:
        file.write(data)


def touch(path: Path) -> bool:
    """Note that a file or folder is used now; return False if there is none."""
    with kernel_call(f"touch {path}"):
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True


def changed_at_s(path: Path) -> float | None:
    """Return when a file or folder was last changed, or touched; None if there is none."""
    with kernel_call(f"look at {path}"):
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            return None


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name on its file system, replacing a file of that name."""
    with kernel_call(f"rename {old} to {new}"):
        old.rename(new)


def rename_for_good(old: Path, new: Path) -> None:
    """As `rename`, and on disk before returning; if this raises, `old` still has its name."""
    rename(old, new)
    try:
        sync_folder(new.parent)
        if old.parent != new.parent:
            sync_folder(old.parent)
    except ForkdError:
        rename(new, old)
        raise


def rename_if_there(old: Path, new: Path) -> bool:
    """As `rename`; returns False if there is nothing to be renamed."""
    with kernel_call(f"rename {old} to {new}"):
        try:
            old.rename(new)
        except FileNotFoundError:
            return False
        return True


def remove_file(path: Path) -> bool:
    """Remove a file; return False if there is none."""
    with kernel_call(f"remove {path}"):
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True


def reserve(path: Path, length_bytes: int) -> None:
    """Give a file that exists its room on the disk; what is in it stays."""
    with kernel_call(f"reserve {length_bytes} bytes for {path}"), path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, length_bytes)


def free_bytes(path: Path) -> int:
    """Return the free space of the file system where `path` is, or would be made."""
    return disk_bytes(path)[0]


def disk_bytes(path: Path) -> tuple[int, int]:
    """Return the free space and the size of the file system where `path` is, or would be made."""
    with kernel_call(f"look at the file system of {path}"):
        while not path.exists():
            path = path.parent
        usage = shutil.disk_usage(path)
    return usage.free, usage.total


def write_atomic(
    path: Path, data: bytes, *, mode: int = 0o644, owner: tuple[int, int] | None = None
) -> None:
    """Put `data` under `path`, whole or not at all, and on disk before returning.

    Of an attempt that failed nothing is left.

    Args:
        path: Where; its folder is there.
        data: All that is to be in it.
        mode: Its permissions.
        owner: Its user and group; ours if None.
    """
    with kernel_call(f"write {path}"):
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        aside = Path(name)
        try:
            try:
                _write_all(descriptor, data)
                if owner is not None:
                    os.fchown(descriptor, *owner)
                os.fchmod(descriptor, mode)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            aside.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


@contextlib.contextmanager
def in_memory(data: bytes) -> Iterator[Path]:
    """Give `data` a path for the block, for what takes files only; it is on no disk."""
    with kernel_call("make a file in memory"):
        descriptor = os.memfd_create("forkd", os.MFD_CLOEXEC)
    try:
        with kernel_call("write a file in memory"):
            _write_all(descriptor, data)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def publish(aside: Path, path: Path) -> None:
    """Give the finished folder `aside` its name `path`, with all that is in it on disk.

    Both must be on one file system, and `path` must not exist or be an empty folder.  If this
    raises, `aside` still has its name.
    """
    sync_file_system(aside)
    rename_for_good(aside, path)


def sync_file_system(path: Path) -> None:
    """Have everything on the file system of `path` on disk.

    One call where a tree of thousands of files would need an fsync each.
    """
    with kernel_call(f"write out the file system of {path}"), _opened(path) as descriptor:
        _syncfs(descriptor)


def _syncfs(descriptor: int) -> None:
    if _LIBC.syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def sync_folder(path: Path) -> None:
    """Have the names in a folder on disk."""
    with kernel_call(f"write out {path}"), _opened(path, os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def hides_holes(path: Path) -> bool:
    """Tell whether a file has holes that its file system does not show, as 9p does."""
    with kernel_call(f"look at {path}"), path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_blocks * 512 >= status.st_size:
            return False
        return os.lseek(file.fileno(), 0, os.SEEK_HOLE) == status.st_size


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file to one that does not exist, sharing blocks where it can, keeping holes."""
    with (
        kernel_call(f"copy {source} to {target}"),
        source.open("rb") as reader,
        target.open("xb") as writer,
    ):
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:
            _copy_ranges(reader.fileno(), writer.fileno())


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or a copy on another file system.

    A copy from a file system that hides holes, a remote one, would be gigabytes of zeros: there
    it is a symbolic link instead.
    """
    try:
        with kernel_call(f"link {target} to {source}"):
            target.hardlink_to(source)
    except ForkdError:
        if hides_holes(source):
            with kernel_call(f"link {target} to {source}"):
                target.symlink_to(source)
        else:
            copy_sparse(source, target)


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
        while wait is not None and not _locked_now(descriptor, path):
            wait()
        with kernel_call(f"lock {path}"):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Lock the file `path` if it is free; the block is told whether."""
    with _lock_file(path) as descriptor:
        yield _locked_now(descriptor, path)


@contextlib.contextmanager
def try_lock_folder(path: Path) -> Iterator[bool]:
    """Lock a folder itself if it is free; the block is told whether."""
    with kernel_call(f"open {path}"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _locked_now(descriptor, path)
    finally:
        os.close(descriptor)


def _locked_now(descriptor: int, path: Path) -> bool:
    with kernel_call(f"lock {path}"):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextlib.contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    with kernel_call(f"open the lock file {path}"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def tree_bytes(path: Path) -> int:
    """Return what a file, or all in a folder, takes on disk; links are not followed."""
    with kernel_call(f"measure {path}"):
        total = path.lstat().st_blocks * 512
        if path.is_dir() and not path.is_symlink():
            for entry in path.rglob("*"):
                with contextlib.suppress(FileNotFoundError):
                    total += entry.lstat().st_blocks * 512
        return total


def remove_tree(path: Path) -> None:
    """Remove a file or a whole folder; what is missing already is no error."""
    with kernel_call(f"remove {path}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=_ignore_missing)
        else:
            path.unlink(missing_ok=True)


def remove_all_but(folder: Path, kept: frozenset[str]) -> None:
    """Remove everything in a folder but the files of certain names; none is fine."""
    if is_there(folder):
        for entry in entries(folder):
            if entry.name not in kept:
                remove_tree(entry)


def remove_from_under(folder: Path) -> None:
    """Remove a folder in which a process that is about to end may still make files.

    It gets another name first, so that nothing can be made in it by its path any more.
    """
    aside = folder.with_name(f"{folder.name}{ASIDE_SUFFIX}")
    rename_if_there(folder, aside)
    remove_tree(aside)


def _ignore_missing(_: object, __: str, details: tuple[object, BaseException, object]) -> None:
    if not isinstance(details[1], FileNotFoundError):
        raise details[1]
