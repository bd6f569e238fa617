"""What the store holds, as snapshots: whole, damaged, or only a record of one that failed.

Pure but for the store that is read; every function blocks.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.errors import ChainError, StoreError
from forkd.model.ids import SandboxId, Tag, parse_tag
from forkd.model.image import ImageConfig
from forkd.model.snapshot import Snapshot, SnapshotCpu, SnapshotStatus
from forkd.store.snapshots import check_link

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forkd.store.manifest import Manifest
    from forkd.store.pending import PendingStore, Record
    from forkd.store.snapshots import SnapshotStore

KILLED = "the daemon ended while it was being written"
"""Why a snapshot failed whose writer left no other reason."""

log = logging.getLogger(__name__)


def read(tag: Tag, store: SnapshotStore) -> Snapshot:
    """Return what is stored under `tag`.  A damaged snapshot is `failed`."""
    try:
        store.load_chain(tag)
        return from_manifest(store.load(tag), store, cached=_is_cached(tag, store))
    except StoreError as error:
        return _damaged(tag, store, error)


def read_all(store: SnapshotStore) -> dict[Tag, Snapshot]:
    """Return everything that is stored.  What is damaged, or depends on it, is `failed`."""
    known: dict[Tag, Snapshot] = {}
    manifests: dict[Tag, Manifest] = {}
    for tag in store.tags():
        try:
            manifests[tag] = store.load(tag)
        except StoreError as error:
            known[tag] = _damaged(tag, store, error)
    faults = {tag: str(snapshot.error) for tag, snapshot in known.items()}
    for tag, manifest in manifests.items():
        snapshot = from_manifest(manifest, store, cached=_is_cached(tag, store))
        fault = fault_of(tag, manifests, faults)
        if fault is not None:
            log.warning("snapshot damaged", extra={"tag": tag, "error": fault})
            snapshot = replace(snapshot, status=SnapshotStatus.FAILED, error=fault)
        known[tag] = snapshot
    return known


def read_failed(
    known: Mapping[Tag, Snapshot], store: SnapshotStore, pending: PendingStore
) -> dict[Tag, Snapshot]:
    """Return what an earlier daemon was writing, or could not write."""
    failed = {}
    for record in pending.records():
        tag = parse_tag(record.tag)
        if tag in known:
            pending.remove(tag)  # it was written, and its writer came no further
            continue
        ended = record.model_copy(update={"error": record.error or KILLED})
        pending.put(ended)
        failed[tag] = _from_record(ended, store)
    return failed


def placeholder(tag: Tag, store: SnapshotStore) -> Snapshot:
    """Return a snapshot of which nothing is known but its name."""
    return Snapshot(
        tag=tag,
        status=SnapshotStatus.WRITING,
        created_at=datetime.now(UTC),
        recipe="",
        image_key="",
        vcpus=0,
        memory_bytes=0,
        disk_bytes=0,
        stored_bytes=0,
        runtime="none",
        parent=None,
        sandboxes=0,
        directory=store.folder(tag),
    )


def from_manifest(manifest: Manifest, store: SnapshotStore, *, cached: bool = False) -> Snapshot:
    """Return a stored snapshot that is whole.  Pure: what is on the disk already cannot fail."""
    tag, link = parse_tag(manifest.tag), manifest.link
    return Snapshot(
        tag=tag,
        status=SnapshotStatus.READY,
        created_at=manifest.created_at,
        recipe=manifest.recipe,
        image_key=manifest.image_key,
        vcpus=manifest.vcpus,
        memory_bytes=manifest.memory_bytes,
        disk_bytes=manifest.disk_bytes,
        stored_bytes=manifest.stored_bytes,
        runtime=manifest.runtime,
        parent=None if manifest.parent is None else parse_tag(manifest.parent, field="parent"),
        sandboxes=0,
        directory=store.folder(tag),
        source=None if link is None or link.source is None else SandboxId(link.source),
        pause_ms=None if link is None else link.pause_ms,
        cached=cached,
        config=None if manifest.config is None else ImageConfig(**manifest.config.model_dump()),
        build_key=manifest.build_key,
        cpu=SnapshotCpu(manifest.cpu.model, manifest.cpu.features),
    )


def _is_cached(tag: Tag, store: SnapshotStore) -> bool:
    """Whether a snapshot may be removed for want of room."""
    return store.cached_used_at_s(tag) is not None


def fault_of(tag: Tag, manifests: Mapping[Tag, Manifest], faults: dict[Tag, str]) -> str | None:
    """Say what is wrong with the chain under a snapshot; None if nothing is.  Pure.

    Args:
        tag: The snapshot; one of `manifests`.
        manifests: Those that are whole by themselves.
        faults: What is wrong with others; what is found is added.
    """
    path: list[Tag] = []
    while tag not in faults and tag in manifests and len(path) <= len(manifests):
        path.append(tag)
        parent = manifests[tag].parent
        if parent is None:
            break
        tag = parse_tag(parent)
    for child in reversed(path):
        fault = _fault(manifests[child], manifests, faults)
        if fault is not None:
            faults[child] = fault
    return faults.get(path[0]) if path else faults.get(tag)


def _fault(
    child: Manifest, manifests: Mapping[Tag, Manifest], faults: Mapping[Tag, str]
) -> str | None:
    """Say what is wrong between a link and its parent."""
    if child.parent is None:
        return None
    parent = parse_tag(child.parent)
    if parent in faults:
        return f"{child.tag} depends on {parent}, which cannot be used: {faults[parent]}"
    if parent not in manifests:
        return f"{child.tag} depends on {parent}, which is missing"
    try:
        check_link(child.tag, child, manifests[parent])
    except ChainError as error:
        return str(error)
    return None


def _from_record(record: Record, store: SnapshotStore) -> Snapshot:
    return replace(
        placeholder(parse_tag(record.tag), store),
        status=SnapshotStatus.FAILED,
        created_at=record.created_at,
        parent=None if record.parent is None else parse_tag(record.parent, field="parent"),
        source=None if record.source is None else SandboxId(record.source),
        error=record.error,
    )


def _damaged(tag: Tag, store: SnapshotStore, error: StoreError) -> Snapshot:
    log.warning("snapshot damaged", extra={"tag": tag, "error": str(error)})
    return replace(placeholder(tag, store), status=SnapshotStatus.FAILED, error=str(error))
