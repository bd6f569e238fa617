"""Look into folders and fill them, where whoever fails throws the whole folder away: for builders.

`files` has what must be whole or absent.  Nothing here is: what a function has begun when it
fails stays, and nothing is on disk when it returns.

Every function blocks, and raises what the kernel refuses as `CapacityError` or `HostError`
(`forkd.host.faults`), naming the path; docstrings name only what else there is.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FOLDER_MODE = 0o755
"""Mode of folders that everybody may look into, whatever our umask is."""


def is_writable(folder: Path) -> bool:
    """Whether we may make files in a folder."""
    return os.access(folder, os.W_OK)


def link_target(path: Path) -> str | None:
    """Return where a symbolic link leads; None if it is none, or not there."""
    with kernel_call(f"look at {path}"):
        return str(path.readlink()) if path.is_symlink() else None


def mode(path: Path) -> int:
    """Return the type and permissions of what a path leads to."""
    with kernel_call(f"look at {path}"):
        return path.stat().st_mode


def matching(folder: Path, pattern: str) -> tuple[Path, ...]:
    """Return the paths below a folder that match a pattern, by name."""
    with kernel_call(f"list {folder}"):
        return tuple(sorted(folder.glob(pattern)))


def make(folder: Path, *, mode: int = FOLDER_MODE) -> None:
    """Make a folder and those above it; one that exists is left as it is."""
    with kernel_call(f"make the folder {folder}"):
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        for each in reversed(missing):
            each.mkdir(exist_ok=True)
            each.chmod(mode)


def write(path: Path, data: bytes) -> None:
    """Write a file, in place of one of that name."""
    with kernel_call(f"write {path}"):
        path.write_bytes(data)


def copy(source: Path, target: Path) -> None:
    """Copy what is in a file, following links, in place of a file called `target`."""
    with kernel_call(f"copy {source} to {target}"):
        shutil.copyfile(source, target)


def link(path: Path, target: str) -> None:
    """Make a symbolic link at `path` that leads to `target`, wherever that is."""
    with kernel_call(f"make the link {path}"):
        path.symlink_to(target)


def set_mode(path: Path, mode: int) -> None:
    """Set the permissions of what a path leads to."""
    with kernel_call(f"set the mode of {path}"):
        path.chmod(mode)


def write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a new file, piece by piece; what `pieces` raises is passed on."""
    with kernel_call(f"write {path}"), path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
