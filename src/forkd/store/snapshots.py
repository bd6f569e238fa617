"""Snapshots on disk: a folder per tag that is whole or absent.

    <state>/staging/         what is being written, replaced or removed; emptied at start
    <state>/snapshots/<tag>/ manifest.json, state, memory, disk.layer; `cached` in one that may go
    <state>/images/<key>/    rootfs.ext4: the layer below every disk of that image

A folder gets its name by one rename after everything in it is on disk.  Every method
may block.
"""

from __future__ import annotations

import logging
import secrets
import threading
from typing import TYPE_CHECKING

from forkd.errors import ChainError, ForkdError, StoreError
from forkd.host import files
from forkd.limits import CHAIN_DEPTH_MAX
from forkd.model.ids import parse_tag
from forkd.store import manifest as manifests
from forkd.store.headers import Magic, read_header
from forkd.store.manifest import MANIFEST_FILE, Manifest

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from forkd.model.ids import Tag

STATE_FILE = "state"
MEMORY_FILE = "memory"
LAYER_FILE = "disk.layer"
ROOTFS_FILE = "rootfs.ext4"
CACHED_FILE = "cached"
"""Marks a snapshot that may be removed for want of room; changed when it is used."""

_REPLACED = "replaced-"
"""Begins the name under which a snapshot waits in staging until its successor has its place."""

log = logging.getLogger(__name__)

_MAGIC = {STATE_FILE: Magic.STATE, MEMORY_FILE: Magic.MEMORY, LAYER_FILE: Magic.LAYER}


class SnapshotStore:
    """The snapshots below one state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._snapshots = state_dir / "snapshots"
        self._staging = state_dir / "staging"
        self._images = state_dir / "images"
        self._staged: set[Path] = set()
        self._keeping = threading.Lock()

    def prepare(self) -> None:
        """Make the folders and remove what an earlier daemon left half-done."""
        for folder in (self._snapshots, self._staging, self._images):
            files.make_folder(folder, parents=True, exist_ok=True)
        for leftover in files.entries(self._staging):
            self._put_back(leftover)
            files.remove_tree(leftover)

    def _put_back(self, leftover: Path) -> None:
        """Give a snapshot its name again if its successor never got it."""
        tag = _tag_of(leftover.name.removeprefix(_REPLACED))
        if tag is None or not leftover.name.startswith(_REPLACED) or self.exists(tag):
            return
        files.rename(leftover, self.folder(tag))
        files.sync_folder(self._snapshots)

    def folder(self, tag: Tag) -> Path:
        """Return where the files of `tag` are, or would be."""
        return self._snapshots / tag

    def exists(self, tag: Tag) -> bool:
        """Whether there is anything under `tag`."""
        return files.is_there(self.folder(tag))

    def tags(self) -> tuple[Tag, ...]:
        """Return every tag that has a folder; what is no tag is not ours."""
        names = (folder.name for folder in files.entries(self._snapshots))
        return tuple(filter(None, map(_tag_of, names)))

    def strangers(self) -> tuple[Path, ...]:
        """Return what lies among the snapshots and is none: no tag, or no manifest."""
        return tuple(
            entry
            for entry in files.entries(self._snapshots)
            if _tag_of(entry.name) is None or not files.is_there(entry / MANIFEST_FILE)
        )

    def reserve_stage(self) -> Path:
        """Return where a new folder to write a snapshot in may be made, and `discard`ed after.

        It is reserved before it is made, so that nobody takes it for one of the `leftovers`.
        """
        folder = self._staging / secrets.token_hex(8)
        self._staged.add(folder)
        return folder

    def stage(self) -> Path:
        """Make a new empty folder to write a snapshot in."""
        folder = self.reserve_stage()
        try:
            files.make_folder(folder)
        except ForkdError:
            self._staged.discard(folder)
            raise
        return folder

    def discard(self, staged: Path) -> bool:
        """Remove a staged folder and all that is in it; one that is gone is fine.

        It gets another name first, so that a writer that is about to end makes nothing in it.
        Whoever discards has done what it was to do, so that what cannot be removed is logged, and
        is one of the `leftovers` from then on.

        Returns:
            Whether nothing is left of it.
        """
        aside = self.reserve_stage()
        try:
            files.rename_if_there(staged, aside)
            files.remove_tree(aside)
        except ForkdError as error:
            log.warning("folder not removed", extra={"path": str(staged), "error": str(error)})
            return False
        finally:
            self._staged -= {staged, aside}
        return True

    def leftovers(self) -> tuple[Path, ...]:
        """Return what lies in staging and nobody is at work on."""
        return tuple(sorted(set(files.entries(self._staging)) - self._staged))

    def publish(self, staged: Path, manifest: Manifest) -> None:
        """Give a staged snapshot its name, after everything in it is on disk.

        Raises:
            StoreError: The files in it are not those that the manifest names.
        """
        _check_files(staged, manifest)
        files.write_atomic(staged / MANIFEST_FILE, manifests.encode(manifest))
        files.publish(staged, self._snapshots / manifest.tag)

    def replace(self, staged: Path, manifest: Manifest) -> None:
        """Put a staged snapshot in the place of the one that has its tag.

        A crash leaves the old one or the new one, whole: `prepare` puts the old one back.

        Raises:
            StoreError: The files in it are not those that the manifest names.
        """
        _check_files(staged, manifest)
        files.write_atomic(staged / MANIFEST_FILE, manifests.encode(manifest))
        files.sync_file_system(staged)
        folder = self._snapshots / manifest.tag
        self._forget_replaced(manifest.tag)
        aside = self._replaced(manifest.tag)
        self._staged.add(aside)
        files.rename_for_good(folder, aside)
        try:
            files.rename_for_good(staged, folder)
        except ForkdError:
            files.rename(aside, folder)
            raise
        self.discard(aside)

    def _replaced(self, tag: str) -> Path:
        """Return where a snapshot is while its successor gets its name."""
        return self._staging / f"{_REPLACED}{tag}"

    def _forget_replaced(self, tag: str) -> None:
        """Put what was replaced out of `prepare`'s sight, which would give it back."""
        replaced = self._replaced(tag)
        if files.is_there(replaced):
            self.discard(self.put_aside(replaced))

    def load(self, tag: Tag) -> Manifest:
        """Read a snapshot's manifest, and check its files by their headers and lengths.

        Raises:
            StoreError: Something is missing, too new or damaged.
        """
        folder = self.folder(tag)
        manifest = manifests.load(folder)
        _check_files(folder, manifest)
        if manifest.disk_bytes and files.size_bytes(self.rootfs(manifest.image_key)) is None:
            raise StoreError(f"the image of {tag} is missing", image_key=manifest.image_key)
        return manifest

    def load_chain(self, tag: Tag) -> tuple[Manifest, ...]:
        """Read the manifests from a snapshot's base to itself, each checked as `load` does.

        Raises:
            StoreError: Something of the snapshot itself is missing, too new or damaged.
            ChainError: An ancestor is, or is not what the chain was made with;
                `context["link"]` is its tag.
        """
        links = [self.load(tag)]
        while (parent := links[-1].parent) is not None:
            if len(links) > CHAIN_DEPTH_MAX:
                raise ChainError(f"{tag} has more than {CHAIN_DEPTH_MAX} ancestors", link=parent)
            links.append(self._load_ancestor(tag, links[-1], parse_tag(parent)))
        return tuple(reversed(links))

    def _load_ancestor(self, tag: Tag, child: Manifest, parent: Tag) -> Manifest:
        if not self.exists(parent):
            raise ChainError(f"{tag} depends on {parent}, which is missing", link=parent)
        try:
            manifest = self.load(parent)
        except StoreError as error:
            raise ChainError(
                f"{tag} depends on {parent}, which cannot be used: {error}", link=parent
            ) from error
        check_link(tag, child, manifest)
        return manifest

    def mark_cached(self, staged: Path) -> None:
        """Have a staged snapshot be one that may be removed for want of room."""
        files.write_atomic(staged / CACHED_FILE, b"")

    def cached_used_at_s(self, tag: Tag) -> float | None:
        """Return when a snapshot was last used that may go; None for any other."""
        return files.changed_at_s(self.folder(tag) / CACHED_FILE)

    def touch_cached(self, tag: Tag) -> None:
        """Note that a snapshot that may go is used now."""
        files.touch(self.folder(tag) / CACHED_FILE)

    def delete(self, tag: Tag) -> None:
        """Remove a snapshot, its name in one step, then its files; one that is gone is fine.

        If this raises, the snapshot is there as before.
        """
        if self.exists(tag):
            self._forget_replaced(tag)
            self.discard(self.put_aside(self.folder(tag)))

    def put_aside(self, path: Path) -> Path:
        """Move what is in the store out of the way, to be discarded; returns where it is now.

        If this raises, it is where it was.
        """
        aside = self.reserve_stage()
        try:
            files.rename_for_good(path, aside)
        except ForkdError:
            self._staged.discard(aside)
            raise
        return aside

    def rootfs(self, image_key: str) -> Path:
        """Return where the store keeps an image's root file system, or would."""
        return self._images / image_key / ROOTFS_FILE

    def keep_rootfs(self, image_key: str, source: Path) -> Path:
        """Keep an image's root file system, so that snapshots survive the image cache.

        On one file system it costs nothing: a hard link, or shared blocks.  From another it
        is copied.  Only from a remote one, which hides holes, it is used where it is: there
        a copy would drag gigabytes of zeros through the wire, and the machine in which that
        happens lives no longer than what it is shared from.
        """
        kept = self.rootfs(image_key)
        with self._keeping:  # two bakes of one image want the same
            if files.is_there(kept):
                return kept
            staged = self.stage()
            try:
                files.link_or_copy(source, staged / ROOTFS_FILE)
                files.remove_tree(kept.parent)
                files.publish(staged, kept.parent)
            finally:
                self.discard(staged)
        return kept

    def unused_images(self, used_keys: Collection[str]) -> tuple[Path, ...]:
        """Return the root file systems that the store keeps and no snapshot depends on."""
        return tuple(path for path in files.entries(self._images) if path.name not in used_keys)


def _tag_of(name: str) -> Tag | None:
    try:
        return parse_tag(name)
    except ForkdError:
        return None


def check_link(head: str, child: Manifest, parent: Manifest) -> None:
    """Return if `child`, a link of the chain of `head`, was made from `parent` as it is now.

    Raises:
        ChainError: It was not; `context["link"]` is the parent's tag.
    """
    if not child.stands_on(parent) or _shape(child) != _shape(parent):
        raise ChainError(
            f"{head} depends on {parent.tag}, which is not the snapshot that {child.tag} was made "
            "from: it was changed or swapped",
            link=parent.tag,
        )


def _shape(manifest: Manifest) -> tuple[str, int, int, int]:
    """Return what all links of a chain have in common."""
    return manifest.image_key, manifest.vcpus, manifest.memory_bytes, manifest.disk_bytes


def _check_files(folder: Path, manifest: Manifest) -> None:
    named = {file.name for file in manifest.files}
    wanted = {STATE_FILE, MEMORY_FILE} | ({LAYER_FILE} if manifest.disk_bytes else set())
    if named != wanted:
        raise StoreError(f"{manifest.tag} names the files {sorted(named)}, not {sorted(wanted)}")
    for file in manifest.files:
        header = read_header(folder / file.name, _MAGIC[file.name])
        if header.digest != file.digest:
            raise StoreError(
                f"{file.name} of {manifest.tag} is damaged: it is not the file that was saved",
                reason="damaged",
            )
