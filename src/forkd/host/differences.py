"""Find what one folder has that another one lacks, and write it as a tar archive.

Names, contents, owners, permissions and targets of links count; times do not.  What only the other
one has does not count either.  Both folders are somebody else's root file system, so no link is
followed, and devices, pipes and sockets are left out.
"""

from __future__ import annotations

import os
import stat
import tarfile
from typing import TYPE_CHECKING

from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READ_BYTES = 1024 * 1024
"""How much of two files is compared at once."""


def write_differences(tree: Path, base: Path, output: Path) -> tuple[str, ...]:
    """Write what `tree` has and `base` lacks as a tar archive; return what replaces another kind.

    Args:
        tree: What is compared.
        base: With what.
        output: The archive, whose members are named relative to the folders.

    Returns:
        The paths at which `base` has a folder, a file or a link, and `tree` another of these.
    """
    replaced = []
    with kernel_call(f"write what {tree} has that {base} has not"):
        made = tarfile.open(output, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - in `with` below
        with made as archive:
            for name, status in _walk(tree, ""):
                old = _status(base / name)
                if old is not None and stat.S_IFMT(old.st_mode) != stat.S_IFMT(status.st_mode):
                    replaced.append(name)
                elif old is not None and _alike(tree / name, status, base / name, old):
                    continue
                _add(archive, tree / name, name)
    return tuple(replaced)


def write_files(tree: Path, output: Path) -> None:
    """Write the files in `tree`, without its folders, as a tar archive; root owns them."""
    with kernel_call(f"write {output}"):
        made = tarfile.open(output, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - in `with` below
        with made as archive:
            for name, status in _walk(tree, ""):
                if not stat.S_ISDIR(status.st_mode):
                    _add(archive, tree / name, name, as_root=True)


def _walk(tree: Path, below: str) -> Iterator[tuple[str, os.stat_result]]:
    """Give each entry, a folder before what is in it, always in one order."""
    for each in sorted(os.scandir(tree / below), key=lambda entry: entry.name):
        status = each.stat(follow_symlinks=False)
        if _is_kept(status.st_mode):
            name = f"{below}/{each.name}" if below else each.name
            yield name, status
            if stat.S_ISDIR(status.st_mode):
                yield from _walk(tree, name)


def _is_kept(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


def _status(path: Path) -> os.stat_result | None:
    """Return what is at a path; None if there is nothing, or something else than a folder above."""
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _alike(new: Path, status: os.stat_result, old: Path, before: os.stat_result) -> bool:
    same = (status.st_mode, status.st_uid, status.st_gid)
    if same != (before.st_mode, before.st_uid, before.st_gid):
        return False
    if stat.S_ISLNK(status.st_mode):
        return new.readlink() == old.readlink()
    return not stat.S_ISREG(status.st_mode) or (
        status.st_size == before.st_size and _same_contents(new, old)
    )


def _same_contents(new: Path, old: Path) -> bool:
    with new.open("rb") as one, old.open("rb") as other:
        while (piece := one.read(READ_BYTES)) == other.read(READ_BYTES):
            if not piece:
                return True
    return False


def _add(archive: tarfile.TarFile, path: Path, name: str, *, as_root: bool = False) -> None:
    member = archive.gettarinfo(path, name)
    member.uname = member.gname = ""
    if member.islnk():  # a hard link: the file, once more
        member.type, member.linkname, member.size = tarfile.REGTYPE, "", path.lstat().st_size
    if as_root:
        member.uid = member.gid = 0
    if member.isreg():
        with path.open("rb") as file:
            archive.addfile(member, file)
    else:
        archive.addfile(member)
