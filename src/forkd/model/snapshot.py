"""A stored machine, named by a tag."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.model.caller import DEFAULT_OWNER, Owner
from forkd.model.checks import in_range
from forkd.model.ids import is_sandbox_id
from forkd.model.recipe import RecipeChanges

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from forkd.model.ids import SandboxId, Tag
    from forkd.model.image import ImageConfig
    from forkd.model.network import NetworkPolicy
    from forkd.model.recipe import RecipeSource


class SnapshotStatus(StrEnum):
    """Where a snapshot is in its life; only a ready one can be forked."""

    WRITING = "writing"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SnapshotCpu:
    """What a guest saw of a processor.

    Attributes:
        model: What it calls itself.
        features: Each of which a host must have to run the snapshot.
    """

    model: str
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stored machine.

    Attributes:
        tag: Its name.
        status: `ready`, or why not.
        created_at: When its bake began.
        recipe: Name of the recipe that it was baked from.
        image_key: The image under its disk; empty until the image is built.
        vcpus: Virtual CPUs of each child.
        memory_bytes: Guest memory of each child.
        disk_bytes: Size of each child's disk.
        stored_bytes: What its files take in the store.
        runtime: The warm runtime's name, or `none`.
        parent: The snapshot that it is a difference against; None for a base.
        depth: How many snapshots are under it.
        chain_bytes: What its files and those of all snapshots under it take in the store.
        source: The sandbox that it was taken of; None if it was baked, or compacted.
        pause_ms: How long that sandbox was paused for it; None while that is not known.
        sandboxes: How many sandboxes forked from it are alive.
        directory: Its folder in the store.
        error: Why it failed; None unless `failed`.
        owner: Whose it is.
        shared: Whether every tenant may use it.
        cached: Whether it may be removed for want of room, as nobody has named it.
        config: What its image says of programs; None if that is not known.
        build_key: The key of the step of a build that it is the result of; None for others.
        cpu: What its guest saw of a processor; None if that is not known.
    """

    tag: Tag
    status: SnapshotStatus
    created_at: datetime
    recipe: str
    image_key: str
    vcpus: int
    memory_bytes: int
    disk_bytes: int
    stored_bytes: int
    runtime: str
    parent: Tag | None
    sandboxes: int
    directory: Path
    error: str | None = None
    depth: int = 0
    chain_bytes: int = 0
    source: SandboxId | None = None
    pause_ms: float | None = None
    owner: Owner = DEFAULT_OWNER
    shared: bool = False
    cached: bool = False
    config: ImageConfig | None = None
    build_key: str | None = None
    cpu: SnapshotCpu | None = None

    @property
    def shared_fraction(self) -> float:
        """How much of the bytes that it needs belong to snapshots under it, 0.0 to 1.0."""
        return 1 - self.stored_bytes / self.chain_bytes if self.chain_bytes else 0.0


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """What to bake, and under which name.

    Attributes:
        tag: Name of the snapshot, already checked.
        recipe: What is baked.
        changes: What is to be otherwise than in the recipe.
        cached: Whether it may be removed for want of room.
    """

    tag: Tag
    recipe: RecipeSource
    changes: RecipeChanges = field(default_factory=RecipeChanges)
    cached: bool = False


CACHED_PREFIX = "image-"
CACHED_DIGITS = 12
"""The name of a snapshot that may go: this, and so many hex digits of what it is made of."""

_KEY = re.compile(limits.BUILD_KEY_PATTERN.removesuffix("$"))
_CACHED = re.compile(rf"{CACHED_PREFIX}[0-9a-f]{{{CACHED_DIGITS}}}")


def check_name(tag: str, *, cached: bool) -> None:
    """Return if a snapshot may be named so, one that may go or any other.

    Raises:
        InvalidRequest: The name is kept for snapshots that may go.
    """
    if not cached and _CACHED.fullmatch(tag):
        raise InvalidRequest(
            f"tag: {tag!r} is kept for snapshots that forkd makes of images; choose a name that is "
            f"not {CACHED_PREFIX!r} and {CACHED_DIGITS} hex digits",
            field="tag",
        )


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """What a durable snapshot is taken of, and under which name.

    Attributes:
        tag: Name of the snapshot, already checked.
        source: A running sandbox; or a snapshot, from which one is forked, and ended afterwards.
        command: Read by the guest's `sh` before the snapshot is taken; None to run nothing.
        timeout_s: How long the command may take.
        wait: Whether the snapshot is reported when it is ready, or when it is being written.
        network: What the fork in which the command runs may reach; None for no network.

    Raises:
        InvalidRequest: There is nothing to run in a fork of a snapshot, or something to run in
            a sandbox; or the command or its time is out of range.
    """

    tag: Tag
    source: SandboxId | Tag
    command: str | None = None
    timeout_s: float = limits.LINK_EXEC_TIMEOUT_S_DEFAULT
    wait: bool = True
    network: NetworkPolicy | None = None

    def __post_init__(self) -> None:
        in_range("timeout_s", self.timeout_s, 0.001, limits.EXEC_TIMEOUT_S_MAX)
        if self.of_sandbox and self.command is not None:
            raise InvalidRequest(
                "exec is for a fork of a snapshot; in a sandbox run it first", field="exec"
            )
        if self.of_sandbox and self.network:
            raise InvalidRequest(
                "network is for a fork of a snapshot; a sandbox has what it has", field="network"
            )
        if not self.of_sandbox and not self.command:
            raise InvalidRequest(
                f"{self.source} is a snapshot: say with exec what is to be different", field="exec"
            )
        if self.command is not None:
            in_range("exec, in bytes,", len(self.command.encode()), 1, limits.EXEC_BYTES_MAX // 4)

    @property
    def of_sandbox(self) -> bool:
        """Whether `source` is a sandbox, which a snapshot of the same name does not hide."""
        return is_sandbox_id(self.source)


@dataclass(frozen=True, slots=True)
class BuiltLink:
    """What a link is that a build has made, or the bake of a recipe over its base.

    Attributes:
        key: Names the step that it is the result of, and all before it; None for a bake.
        config: What its image says of programs.
        cached: Whether it may be removed for want of room.
        recipe: The recipe that was baked; None for that of its parent.
        runtime: The warm runtime's name; None for that of its parent.
    """

    key: str | None
    config: ImageConfig
    cached: bool
    recipe: str | None = None
    runtime: str | None = None


@dataclass(frozen=True, slots=True)
class BuildLinkRequest:
    """The result of a step of a build.

    Attributes:
        key: Names it, among those of its tenant.
        config: What its image says of programs.
        sandbox: What it is written from, unless it is there; None to look only.
        tag: Its name; None for one of the daemon's, under which it may be removed again.

    Raises:
        InvalidRequest: The key is malformed, or the configuration too long.
    """

    key: str
    config: ImageConfig
    sandbox: SandboxId | None = None
    tag: Tag | None = None

    def __post_init__(self) -> None:
        if _KEY.fullmatch(self.key) is None:
            raise InvalidRequest("key is not 64 hex digits", field="key")
        self.config.check()


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed from the store.

    Attributes:
        kind: What it was: `snapshot`, `failed`, `staging`, `folder`, `image`, `initramfs`
            or `recipe`.
        name: Its tag, or the name of its folder.
        bytes: What it took.
    """

    kind: str
    name: str
    bytes: int
