"""Files of the kernel that each hold a value: below /proc/sys, and in cgroups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path | str, value: str, *, dir_fd: int | None = None) -> None:
    """Write a value, for which `Path.write_text` takes five times as long; the file must exist.

    Args:
        path: Relative to `dir_fd`, if that is given.
        value: As text.
        dir_fd: Descriptor of a folder.

    Raises:
        OSError: The kernel refused, or has no such file.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)
