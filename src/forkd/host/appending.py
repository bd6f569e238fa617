"""A file to which lines are appended, and that may be renamed meanwhile."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Self

from forkd.errors import ForkdError
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from pathlib import Path


class AppendedFile:
    """A file that is open for appending; close it."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path

    @classmethod
    def open(cls, path: Path, mode: int) -> Self:
        """Open a file, made with `mode` if it is missing.

        Raises:
            CapacityError: The disk is full, or there are too many open files.
            HostError: The kernel refused.
        """
        with kernel_call(f"open {path}", path=str(path)):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            return cls(os.open(path, flags, mode), path)

    @property
    def permissions(self) -> int | None:
        """Its permission bits; None if it is no regular file.

        Raises:
            HostError: The kernel does not say.
        """
        with kernel_call(f"look at {self._path}"):
            mode = os.fstat(self._descriptor).st_mode
        return stat.S_IMODE(mode) if stat.S_ISREG(mode) else None

    def ends_within_a_line(self) -> bool:
        """Whether its last line has no end; False if the kernel does not say."""
        try:
            size = os.fstat(self._descriptor).st_size
            return size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        except OSError:
            return False

    def write(self, data: bytes) -> tuple[int, ForkdError | None]:
        """Append as much as can be; return how much, and why not more."""
        done = 0
        try:
            with kernel_call(f"write {self._path}", path=str(self._path)):
                while done < len(data):
                    done += os.write(self._descriptor, data[done:])
        except ForkdError as error:
            return done, error
        return done, None

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)
