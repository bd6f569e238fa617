"""File systems of tests' own."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def mounted(kind: str, folder: Path, options: str = "rw") -> Iterator[None]:
    """Mount a file system that needs no device, for the block."""
    mount = ["/usr/bin/mount", "-t", kind, "-o", options, kind, str(folder)]
    subprocess.run(mount, check=True)  # noqa: S603 - a constant command
    try:
        yield
    finally:
        subprocess.run(["/usr/bin/umount", str(folder)], check=True)  # noqa: S603 - as above
