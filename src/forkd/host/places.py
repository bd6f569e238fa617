"""Places of which one process of this host has each: locked files in a folder that is ours alone.

A name that anybody can take, such as a socket's in the abstract namespace, is no place: any user of
the host could hold all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from forkd.errors import HostError
from forkd.host.faults import kernel_call
from forkd.host.files import PRIVATE

if TYPE_CHECKING:
    from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(slots=True)
class Place:
    """One that we have, until it is closed or this process ends."""

    folder: Path
    name: str
    _descriptor: int

    @classmethod
    def take(cls, folder: Path, name: str) -> Self | None:
        """Take a place; None if a process has it.

        Raises:
            HostError: The folder is not ours alone, or the kernel refused.
        """
        while True:
            with kernel_call(f"take the place {name} in {folder}"):
                descriptor = _open(folder, name)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(descriptor).st_nlink:
                        return cls(folder, name, descriptor)
                except BlockingIOError:
                    os.close(descriptor)
                    return None
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)  # who had it has just removed it

    def close(self) -> None:
        """Give the place back; nothing of it stays."""
        with kernel_call(f"give the place {self.name} back"):
            (self.folder / self.name).unlink(missing_ok=True)
            os.close(self._descriptor)
            with contextlib.suppress(OSError):  # others have places there
                self.folder.rmdir()


def sweep(folder: Path) -> None:
    """Give back the places of holders that were killed; blocks.

    Raises:
        HostError: As for `Place.take`.
    """
    with kernel_call(f"list {folder}"):
        names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    for name in names:
        if (left := Place.take(folder, name)) is not None:
            left.close()


def _open(folder: Path, name: str) -> int:
    """Open the file of a place in its folder, making both."""
    while True:
        folder.mkdir(mode=PRIVATE, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed with the last place in it
            opened = os.open(folder, _FOLDER)
            try:
                found = os.fstat(opened)
                if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
                    raise HostError(
                        f"{folder} is not ours alone: remove it, or make it a folder of mode 0700 "
                        "of the daemon's user"
                    )
                return os.open(name, _FILE, 0o600, dir_fd=opened)
            finally:
                os.close(opened)
