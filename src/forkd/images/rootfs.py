"""Turn a folder into the ext4 file system that a machine boots.

The file system is made for machines that are forked, not for a disk that lives for years:

- no journal: memory and disk are always frozen together, so there is never a replay, and
  each child would copy journal blocks to protect nothing;
- inode tables are holes, which are zeros, and said to be zeroed: they take no room in the image,
  and no `ext4lazyinit` thread wakes up in every child;
- as many inodes for a sandbox as its disk has room for small files, besides those of the image;
- no blocks reserved for root, who is everybody in a sandbox;
- 4 KiB blocks, which is what the layers above it are made of;
- UUID and hash seed come from the image's key, and holes stay holes.

What we add to a root file system goes through `install`, which never follows a symbolic
link out of it: an image from elsewhere may well have one.
"""

from __future__ import annotations

import stat
import struct
import uuid
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from forkd.errors import BuildError, HostError
from forkd.host import files, folders
from forkd.images.namespace import run_as_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.images.steps import Build

EXT4_TIMEOUT_S = 1_800.0

LINKS_MAX = 40
"""Most symbolic links followed on the way to one file, as in the kernel."""

BLOCK_BYTES = 4_096

BYTES_PER_FREE_INODE = 8_192
"""One file more for each so many bytes of the disk; until then its inode is part of a hole."""

FREE_INODES_MIN = 131_072
"""No fewer, where there are so many blocks."""

_RESERVED_INODES = 16
"""More than ext4 has for itself."""

MOUNT_POINTS = ("dev", "proc", "run", "sys", "tmp")
"""Folders that the agent mounts over; an image may come without them."""

_SUPERBLOCK_OFFSET = 1024
_MAGIC_OFFSET = 0x38
_MAGIC = 0xEF53
_KEY_NAMESPACE = uuid.UUID("5f8a2f0e-9f4c-4f1d-9f0b-7d6f2d1c6e11")


def make_ext4(folder: Path, image: Path, *, disk_mib: int, key: str, build: Build) -> None:
    """Write the ext4 file system `image` with what is in `folder`.

    Raises:
        BuildError: It does not fit into `disk_mib`.
    """
    inodes = inodes_for(_count(folder, build), disk_mib)
    identity = str(uuid.uuid5(_KEY_NAMESPACE, key))
    features = "^has_journal,^resize_inode"
    extended = "lazy_itable_init=0,assume_storage_prezeroed=1,nodiscard,root_owner=0:0"
    build.tell("rootfs", f"writing a file system of {disk_mib} MiB", 0.0)
    args: list[str | Path] = [
        *("mke2fs", "-q", "-F", "-t", "ext4", "-b", str(BLOCK_BYTES), "-m", "0"),
        *("-N", str(inodes), "-O", features, "-E", f"{extended},hash_seed={identity}"),
        *("-U", identity, "-L", "forkd-root"),
        *("-d", folder, image, f"{disk_mib}M"),
    ]
    try:
        run_as_root(args, build, timeout_s=EXT4_TIMEOUT_S)
    except BuildError as error:
        if "Could not allocate" in str(error) or "No free space" in str(error):
            raise BuildError(_too_small(disk_mib), **error.context) from error
        raise
    build.run(["fallocate", "--dig-holes", image], timeout_s=EXT4_TIMEOUT_S)
    build.tell("rootfs", f"file system of {files.tree_bytes(image) >> 20} MiB written", 1.0)


def _too_small(disk_mib: int) -> str:
    return (
        f"the image does not fit into {disk_mib} MiB; raise machine.disk_mib, "
        "or leave kernel modules out with image.modules = 'none'"
    )


def inodes_for(entries: int, disk_mib: int) -> int:
    """Return how many inodes a file system of `disk_mib` gets for an image of so many entries.

    Raises:
        BuildError: It cannot have so many: ext4 has at most one for each block.
    """
    disk_bytes = disk_mib << 20
    most = disk_bytes // BLOCK_BYTES
    if entries + _RESERVED_INODES > most:
        raise BuildError(
            f"the image has {entries} files and folders, but a file system of {disk_mib} MiB has "
            f"at most {most} inodes; raise machine.disk_mib"
        )
    return min(entries + max(disk_bytes // BYTES_PER_FREE_INODE, FREE_INODES_MIN), most)


def _count(folder: Path, build: Build) -> int:
    """Return how many inodes the files and folders in `folder` take, itself included."""
    lines: list[str] = []
    args: list[str | Path] = ["du", "--inodes", "--summarize", folder]
    run_as_root(args, build, timeout_s=EXT4_TIMEOUT_S, on_line=lines.append)
    return int(lines[-1].split()[0])


def check_ext4(path: Path) -> int:
    """Return the size in bytes of the ext4 file system in `path`.

    Raises:
        BuildError: It is missing, no ext4, or no whole number of blocks.
    """
    found = files.read_start(path, BLOCK_BYTES)
    if found is None:
        raise BuildError(f"no root file system at {path}", path=str(path))
    start, size = found
    superblock = start[_SUPERBLOCK_OFFSET:]
    if superblock[_MAGIC_OFFSET : _MAGIC_OFFSET + 2] != struct.pack("<H", _MAGIC):
        raise BuildError(f"{path} is no ext4 file system", path=str(path))
    if size % BLOCK_BYTES:
        raise BuildError(f"{path} is no whole number of {BLOCK_BYTES}-byte blocks")
    return size


def resolve(root: Path, path: PurePosixPath) -> Path:
    """Return where the guest's `path` is under `root`, with links followed as the guest would.

    The last component is not followed: it is about to be replaced.

    Raises:
        BuildError: More than `LINKS_MAX` links, or a file where a folder should be.
    """
    todo = list(reversed(path.parts[1:]))
    done = PurePosixPath("/")
    links = 0
    while todo:
        part = todo.pop()
        done = done.parent if part == ".." else done / part
        here = root / done.relative_to("/")
        if not todo:
            return here
        if (link := folders.link_target(here)) is not None:
            links += 1
            if links > LINKS_MAX:
                raise BuildError(f"too many symbolic links on the way to {path}", path=str(path))
            target = PurePosixPath(link)
            todo.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
            done = PurePosixPath("/") if target.is_absolute() else done.parent
        elif files.is_there(here) and not files.is_folder(here):
            raise BuildError(f"{done} is not a folder, so there is no {path}", path=str(path))
    return root / done.relative_to("/")


def make_folder(root: Path, path: PurePosixPath) -> Path:
    """Return the folder `path` under `root`, made with what leads to it where missing."""
    folder = resolve(root, path / "_").parent
    folders.make(folder)
    return folder


def install(root: Path, target: PurePosixPath, data: Path | bytes, mode: int) -> None:
    """Put a file under the guest's name `target`, in place of what is there.

    Raises:
        BuildError: The image does not allow it, see `resolve`.
    """
    try:
        make_folder(root, target.parent)
        here = resolve(root, target)
        if files.is_folder(here) and folders.link_target(here) is None:
            raise BuildError(f"{target} is a folder in the image", path=str(target))
        files.remove_file(here)
        if isinstance(data, bytes):
            folders.write(here, data)
        else:
            folders.copy(data, here)
        folders.set_mode(here, mode)
    except HostError as error:
        raise BuildError(f"cannot install {target}: {error}") from error


def install_tree(root: Path, target: PurePosixPath, source: Path) -> None:
    """Put all files in the folder `source` under the guest's folder `target`."""
    for path, relative in walk_files(source):
        install(root, target / relative, path, default_mode(path))


def link_if_missing(root: Path, target: PurePosixPath, to: str) -> None:
    """Make the guest's name `target` a symbolic link, unless there is anything."""
    try:
        make_folder(root, target.parent)
        here = resolve(root, target)
        if folders.link_target(here) is None and not files.is_there(here):
            folders.link(here, to)
    except HostError as error:
        raise BuildError(f"cannot install {target}: {error}") from error


def walk_files(folder: Path) -> Iterator[tuple[Path, PurePosixPath]]:
    """Give each file in a folder, by name, with its path relative to the folder.

    Symbolic links and what is no regular file are left out.
    """
    for each in folders.matching(folder, "**/*"):
        if files.is_file(each) and folders.link_target(each) is None:
            yield each, PurePosixPath(each.relative_to(folder))


def default_mode(path: Path) -> int:
    """Return the permissions of a file that a recipe gives none for."""
    return 0o755 if folders.mode(path) & stat.S_IXUSR else 0o644
