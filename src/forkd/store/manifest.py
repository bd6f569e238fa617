"""A snapshot's manifest: what its folder holds and what it was made from."""

from __future__ import annotations

import json
from datetime import datetime  # noqa: TC003 - pydantic reads the annotation at run time
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forkd.errors import InvalidRequest, StoreError
from forkd.model.ids import parse_tag

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 1

MANIFEST_BYTES_MAX = 1024 * 1024
"""Longest manifest that is read; ours have some kilobytes, but stores are copied around."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoredFile(_Part):
    """One file in a snapshot's folder: its name, length and the digest of its body."""

    name: Literal["state", "memory", "disk.layer"]
    bytes: int = Field(ge=0)
    digest: str


class Cpu(_Part):
    """The host CPU that the guest saw; it can only be restored where that is available."""

    model: str
    features: tuple[str, ...]


class Manifest(_Part):
    """What a snapshot is.

    Attributes:
        version: Of this format.
        tag: Its name; the folder has the same.
        created_at: When its bake began, UTC.
        recipe: The name of its recipe.
        image_key: Names the image under its disk.
        kernel: File name of the kernel that it booted.
        vcpus: Virtual CPUs.
        memory_bytes: Guest memory.
        disk_bytes: Size of the disk.
        runtime: The warm runtime, or `none`.
        cpu: What it ran on.
        parent: The snapshot that it is a difference against; None for a base.
        files: What else is in the folder.
    """

    version: int = MANIFEST_VERSION
    tag: str
    created_at: datetime
    recipe: str
    image_key: str
    kernel: str
    vcpus: int = Field(ge=1)
    memory_bytes: int = Field(ge=1)
    disk_bytes: int = Field(ge=0)
    runtime: str
    cpu: Cpu
    parent: str | None = None
    files: tuple[StoredFile, ...]

    @property
    def stored_bytes(self) -> int:
        """What the files take."""
        return sum(file.bytes for file in self.files)


def encode(manifest: Manifest) -> bytes:
    """Return the manifest's file."""
    return manifest.model_dump_json(indent=2).encode() + b"\n"


def load(folder: Path) -> Manifest:
    """Read the manifest in a snapshot's folder.

    Raises:
        StoreError: It is missing, too new or damaged, or speaks of another tag.
    """
    path = folder / MANIFEST_FILE
    try:
        with path.open("rb") as file:
            raw = file.read(MANIFEST_BYTES_MAX + 1)
    except OSError as error:
        raise StoreError(f"{folder.name} has no manifest: {error.strerror}") from error
    if len(raw) > MANIFEST_BYTES_MAX:
        raise StoreError(f"the manifest of {folder.name} exceeds {MANIFEST_BYTES_MAX} bytes")
    manifest = _parse(folder.name, raw)
    if manifest.tag != folder.name:
        raise StoreError(f"the manifest of {folder.name} speaks of {manifest.tag[:80]!r}")
    return manifest


def _parse(name: str, raw: bytes) -> Manifest:
    try:
        value = json.loads(raw)
        version = value.get("version") if isinstance(value, dict) else None
        if isinstance(version, int) and version > MANIFEST_VERSION:
            raise StoreError(
                f"the manifest of {name} has version {version}, and we read {MANIFEST_VERSION}"
            )
        manifest = Manifest.model_validate_json(raw)
        if manifest.parent is not None:
            parse_tag(manifest.parent, field="parent")
    except (ValueError, ValidationError, InvalidRequest) as error:
        raise StoreError(f"the manifest of {name} is damaged: {error}") from error
    return manifest
