"""A snapshot's manifest: what its folder holds and what it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field

from forkd.errors import InvalidRequest, StoreError
from forkd.host import files
from forkd.limits import BUILD_KEY_PATTERN
from forkd.model.ids import parse_tag

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST_FILE = "manifest.json"

MANIFEST_VERSION = 3
"""Latest version that is read; 2 added `link`, 3 `config` and `build_key`.  A manifest without
these is still written as 1, or 2."""

MANIFEST_BYTES_MAX = 1024 * 1024
"""Longest manifest that is read; ours have some kilobytes, but stores are copied around."""


REPLACES_MAX = 1024
"""Most digests that one snapshot stands in for: one is added each time that it is compacted."""

_LINK_VERSION = 2
_CONFIG_VERSION = 3


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoredFile(_Part):
    """One file in a snapshot's folder: its name, length and the digest of its body."""

    name: Literal["state", "memory", "disk.layer"]
    bytes: int = Field(ge=0)
    digest: str


class Cpu(_Part):
    """What its guest saw of a processor; it can only be restored where that is available."""

    model: str
    features: tuple[str, ...]


class Link(_Part):
    """What ties a snapshot to others: the parent under it, and those that it stands in for.

    Attributes:
        parent_digest: What `Manifest.digest` of the parent was when this was written; None for
            a base.
        replaces: Digests of snapshots of the same content, which this one has replaced:
            their children may depend on it.
        source: The sandbox that it was taken of; None if it was made of snapshots alone.
        pause_ms: How long that sandbox was paused for it.
    """

    parent_digest: str | None = None
    replaces: tuple[str, ...] = Field(default=(), max_length=REPLACES_MAX)
    source: str | None = None
    pause_ms: float | None = Field(default=None, ge=0)


class Config(_Part):
    """What the snapshot's image says of programs; `model.image.ImageConfig` describes each."""

    env: Mapping[str, str]
    cwd: str
    user: str
    entrypoint: tuple[str, ...] | None
    cmd: tuple[str, ...] | None
    ports: tuple[str, ...]
    labels: Mapping[str, str]
    healthcheck: Mapping[str, str | tuple[str, ...]]
    stop_signal: str
    volumes: tuple[str, ...]
    shell: tuple[str, ...]


class Manifest(_Part):
    """What a snapshot is.

    Attributes:
        version: Of this format.
        tag: Its name; the folder has the same.
        created_at: When its bake began, UTC.
        recipe: The name of its recipe.
        image_key: Names the image under its disk.
        kernel: The version of the kernel that it booted, and `@sha256:` with its file's digest.
        vcpus: Virtual CPUs.
        memory_bytes: Guest memory.
        disk_bytes: Size of the disk.
        runtime: The warm runtime, or `none`.
        cpu: What it ran on.
        parent: The snapshot that it is a difference against; None for a base.
        files: What else is in the folder.
        link: What ties it to other snapshots; None for one that was baked.
        config: What its image says of programs; None if that is not known.
        build_key: The key of the step of a build that made it; None for others.
    """

    version: int = 1
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
    link: Link | None = None
    config: Config | None = None
    build_key: str | None = Field(default=None, pattern=BUILD_KEY_PATTERN)

    @property
    def stored_bytes(self) -> int:
        """What the files take."""
        return sum(file.bytes for file in self.files)

    @property
    def digest(self) -> str:
        """Names the content: the digest of its files' digests and of the parent's own."""
        under = "" if self.link is None else self.link.parent_digest or ""
        lines = sorted(f"{file.name} {file.digest}\n" for file in self.files)
        return blake3(f"parent {under}\n{''.join(lines)}".encode()).hexdigest()

    def stands_on(self, parent: Manifest) -> bool:
        """Whether `parent` is, or stands in for, what this was written against."""
        wanted = None if self.link is None else self.link.parent_digest
        replaces = () if parent.link is None else parent.link.replaces
        return wanted is not None and (wanted == parent.digest or wanted in replaces)


def encode(manifest: Manifest) -> bytes:
    """Return the manifest's file, in the oldest version that can say it."""
    version, absent = 1, {"link", "config", "build_key"}
    if manifest.link is not None:
        version, absent = _LINK_VERSION, absent - {"link"}
    if manifest.config is not None or manifest.build_key is not None:
        version, absent = _CONFIG_VERSION, absent - {"config", "build_key"}
    said = manifest.model_copy(update={"version": version})
    return said.model_dump_json(indent=2, exclude=absent).encode() + b"\n"


def load(folder: Path) -> Manifest:
    """Read the manifest in a snapshot's folder.

    Raises:
        StoreError: It is missing, too new or damaged, or speaks of another tag.
    """
    path = folder / MANIFEST_FILE
    raw = files.read(path, MANIFEST_BYTES_MAX + 1)
    if raw is None:
        raise StoreError(f"{folder.name} has no manifest: there is no {path}")
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
                f"the manifest of {name} has version {version}, and this forkd reads up to "
                f"{MANIFEST_VERSION}: start a later forkd, or bake the snapshot again",
                reason="too_new",
                version=version,
            )
        manifest = Manifest.model_validate_json(raw)
        _check_parent(manifest)
    except (ValueError, RecursionError, InvalidRequest) as error:
        raise StoreError(f"the manifest of {name} is damaged: {error}") from error
    return manifest


def _check_parent(manifest: Manifest) -> None:
    """Return if a manifest names a parent and its digest, or neither.

    Raises:
        ValueError: It has one without the other.
        InvalidRequest: The parent's name is no tag.
    """
    if manifest.parent is not None:
        parse_tag(manifest.parent, field="parent")
    digest = None if manifest.link is None else manifest.link.parent_digest
    if (manifest.parent is None) != (digest is None):
        raise ValueError("it names a parent without its digest, or a digest without its parent")
