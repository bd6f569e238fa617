"""The images that a cache holds: whose they are, what they take, when they were last used.

When an image was last used is when its folder was changed: nothing in it ever is.  What the cache
knows of tags is here, too: the digest that each had when it was last asked for.

    images/<key>/manifest.json      says name, tenant, reference and size
    references/<sha256>.json        {"reference": …, "digest": …}

Every function blocks.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import BuildError, HostError
from forkd.host import files, folders
from forkd.images.layout import PARTIAL_PREFIX

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.images.layout import Cache

MANIFEST_NAME = "manifest.json"

MANIFEST_BYTES_MAX = 8 << 20
"""How much of a manifest is read: one names some thousand packages."""

REFERENCES_MAX = 10_000
"""Most tags whose digest is remembered; the one asked for longest ago is forgotten first."""

REFERENCE_BYTES_MAX = 4_096

REMOVED_PREFIX = f"{PARTIAL_PREFIX}removed-"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image in the cache.

    Attributes:
        key: Names it.
        name: The recipe's name.
        tenant: Whose request built it.
        reference: The image of a registry that it was made of, with its digest; None for others.
        stored_bytes: What it takes.
        used_at_s: When it was last used.
    """

    key: str
    name: str
    tenant: str
    reference: str | None
    stored_bytes: int
    used_at_s: float


def images_of(cache: Cache) -> tuple[StoredImage, ...]:
    """Return every whole image, the one that was used longest ago first."""
    found = (image_of(cache, each.name) for each in folders.matching(cache.images, "[!.]*"))
    return tuple(sorted(filter(None, found), key=lambda each: each.used_at_s))


def image_of(cache: Cache, key: str) -> StoredImage | None:
    """Return one image; None if there is none."""
    folder = cache.images / key
    used_at_s = files.changed_at_s(folder)
    if used_at_s is None:
        return None
    said = _read(folder / MANIFEST_NAME, MANIFEST_BYTES_MAX)
    stored_bytes = said.get("stored_bytes")
    return StoredImage(
        key=key,
        name=str(said.get("name", "")),
        tenant=str(said.get("tenant") or "default"),
        reference=None if said.get("reference") is None else str(said["reference"]),
        stored_bytes=stored_bytes if isinstance(stored_bytes, int) else files.tree_bytes(folder),
        used_at_s=used_at_s,
    )


def remove_image(cache: Cache, key: str, *, unused_since_s: float) -> bool:
    """Remove an image; return whether it was there, unused since then, and in nobody's hands."""
    aside = put_aside(cache, key, unused_since_s=unused_since_s)
    if aside is None:
        return False
    files.remove_tree(aside)
    return True


def put_aside(cache: Cache, key: str, *, unused_since_s: float) -> Path | None:
    """Move an image out of the way in one step; the caller removes what it is now.

    Returns:
        None if it is not there, was used since then, or is in somebody's hands.
    """
    folder = cache.images / key
    with files.try_lock(cache.locks / f"image-{key}.lock") as mine:
        used_at_s = files.changed_at_s(folder)
        if not mine or used_at_s is None or used_at_s > unused_since_s:
            return None
        aside = folder.with_name(f"{REMOVED_PREFIX}{key}")
        files.remove_tree(aside)
        try:
            files.rename(folder, aside)
        except HostError:  # a lower layer of an overlay: its folders have the names that they have
            files.remove_tree(folder)
    return aside


def digest_of(cache: Cache, reference: str) -> str | None:
    """Return the digest that a tag had when it was last asked for; None if it never was."""
    said = _read(_file_of(cache, reference), REFERENCE_BYTES_MAX)
    digest = said.get("digest")
    return digest if said.get("reference") == reference and isinstance(digest, str) else None


def remember(cache: Cache, reference: str, digest: str) -> None:
    """Note the digest that a tag has now."""
    try:
        folders.make(_references(cache))
        text = json.dumps({"reference": reference, "digest": digest})
        files.write_atomic(_file_of(cache, reference), text.encode())
        known = files.entries(_references(cache))
        for each in sorted(known, key=_changed)[: max(0, len(known) - REFERENCES_MAX)]:
            files.remove_file(each)
    except HostError as error:  # it is asked for again
        log.warning("digest not noted", extra={"reference": reference, "error": str(error)})


def _changed(path: Path) -> float:
    return files.changed_at_s(path) or 0.0


def _references(cache: Cache) -> Path:
    return cache.folder / "references"


def _file_of(cache: Cache, reference: str) -> Path:
    return _references(cache) / f"{hashlib.sha256(reference.encode()).hexdigest()}.json"


def _read(path: Path, bytes_max: int) -> dict[str, object]:
    """Return what a file of ours says; nothing if it is missing or damaged."""
    try:
        found = json.loads(files.read(path, bytes_max) or b"{}")
    except (ValueError, RecursionError, BuildError):
        return {}
    return found if isinstance(found, dict) else {}
