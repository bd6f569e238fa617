"""What a machine boots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.model.caller import Tenant
    from forkd.model.ids import Tag
    from forkd.model.recipe import RecipeChanges, RecipeSource


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


@dataclass(frozen=True, slots=True)
class CachedImage:
    """An image in the cache.

    Attributes:
        key: Names the contents.
        name: The recipe's name.
        tenant: Whose request built it.
        reference: The image of a registry that it was made of; None for others.
        digest: Its digest there.
        stored_bytes: What it takes.
        used_at_s: When it was last used.
        snapshots: Those that need it, as far as they may be told.
    """

    key: str
    name: str
    tenant: Tenant
    reference: str | None
    digest: str | None
    stored_bytes: int
    used_at_s: float
    snapshots: tuple[Tag, ...]


@dataclass(frozen=True, slots=True)
class ImageSnapshotRequest:
    """What a snapshot without a name is wanted of.

    Attributes:
        image: An image or a recipe.
        changes: What is to be otherwise than in it.
        pull: Whether a registry is asked for its digest though it is known.
    """

    image: RecipeSource
    changes: RecipeChanges
    pull: bool = False
