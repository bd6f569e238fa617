"""What a machine boots."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from forkd import limits
from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from forkd.model.caller import Tenant
    from forkd.model.ids import Tag
    from forkd.model.recipe import RecipeChanges, RecipeSource


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says of programs in it; forks of its snapshots begin with it.

    Attributes:
        env: Variables.
        cwd: Where programs start.
        user: Who they run as: a name, or `uid[:gid]`.
        entrypoint: The program that the image is for; None if it names none.
        cmd: Its arguments, or the program if there is no entrypoint; None for none.
        ports: Ports that programs listen on, as `80/tcp`.
        labels: Text by key.
        healthcheck: How it is asked whether all is well; empty for not at all.
        stop_signal: What ends the program; empty for the usual one.
        volumes: Folders that are data.
        shell: What reads lines in Dockerfiles.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    user: str = "root"
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    ports: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    healthcheck: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    stop_signal: str = ""
    volumes: tuple[str, ...] = ()
    shell: tuple[str, ...] = ("/bin/sh", "-c")

    def check(self) -> None:
        """Return if a snapshot can keep it.

        Raises:
            InvalidRequest: It is too long.
        """
        length = len(json.dumps(asdict(self)))
        if length > limits.IMAGE_CONFIG_BYTES_MAX:
            raise InvalidRequest(
                f"config has {length} bytes; at most {limits.IMAGE_CONFIG_BYTES_MAX} are kept",
                field="config",
            )


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
