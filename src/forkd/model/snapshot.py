"""A stored machine, named by a tag."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from forkd.model.ids import Tag


class SnapshotStatus(StrEnum):
    """Where a snapshot is in its life; only a ready one can be forked."""

    WRITING = "writing"
    READY = "ready"
    FAILED = "failed"


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
        runtime: The warm runtime: `python` or `none`.
        parent: The snapshot that it is a difference against; None for a base.
        sandboxes: How many sandboxes forked from it are alive.
        directory: Its folder in the store.
        error: Why it failed; None unless `failed`.
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


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """What to bake, and under which name.

    Attributes:
        tag: Name of the snapshot, already checked.
        recipe_path: Absolute path of a recipe's folder or of its TOML file, on the daemon's host.
    """

    tag: Tag
    recipe_path: Path
