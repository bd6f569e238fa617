"""Look into an ext4 file system without mounting it, with e2fsprogs' debugger."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """What a folder says of one name in it."""

    mode: int
    uid: int
    gid: int


def read(image: Path, path: str) -> bytes:
    """Return the contents of a file in the file system `image`."""
    return _debugfs(image, f'cat "{path}"')


def listing(image: Path, path: str) -> dict[str, Entry]:
    """Return what is in a folder of the file system `image`, by name."""
    found = {}
    for line in _debugfs(image, f'ls -p "{path}"').decode().splitlines():
        if line.startswith("/"):
            _, _, mode, uid, gid, name, *_ = line.split("/")
            found[name] = Entry(int(mode, 8), int(uid), int(gid))
    return found


def check(image: Path) -> str:
    """Return what `e2fsck` finds wrong with the file system `image`; empty if nothing."""
    done = subprocess.run(  # noqa: S603 - our own arguments
        ["/sbin/e2fsck", "-fn", str(image)], capture_output=True, check=False, timeout=60
    )
    return "" if done.returncode == 0 else done.stdout.decode()


def _debugfs(image: Path, request: str) -> bytes:
    done = subprocess.run(  # noqa: S603 - our own arguments
        ["/sbin/debugfs", "-R", request, str(image)], capture_output=True, check=True, timeout=60
    )
    return done.stdout
