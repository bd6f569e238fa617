"""What a machine boots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Image:
    """A root file system and a kernel, built from a recipe.

    Attributes:
        key: Names the contents: the same recipe gives the same key.
        name: The recipe's name.
        kernel: The kernel to boot.
        initramfs: What the kernel runs first; None if it can mount the root itself.
        rootfs: An ext4 file system, never written to.
        disk_bytes: Size of the disk that a machine sees.
    """

    key: str
    name: str
    kernel: Path
    initramfs: Path | None
    rootfs: Path
    disk_bytes: int
