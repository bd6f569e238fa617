"""Which files the zygote of a snapshot, and those of its ancestors, are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.engine.configs import DiskConfig
from forkd.host import files
from forkd.model.ids import parse_tag
from forkd.store.snapshots import LAYER_FILE, MEMORY_FILE, STATE_FILE

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterable
    from pathlib import Path

    from forkd.model.ids import Tag
    from forkd.store.snapshots import SnapshotStore


@dataclass(frozen=True, slots=True)
class LinkFiles:
    """What the zygote of one link is made of.

    Attributes:
        tag: The link.
        state: Its state.
        memory: Its memory: all of it for a base, what differs from its parent for a delta.
        disk: Every layer of the disk, those of its ancestors included.
    """

    tag: Tag
    state: Path
    memory: Path
    disk: DiskConfig | None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file."""
        return (self.state, self.memory, *(() if self.disk is None else self.disk.layers))


Chain = tuple[LinkFiles, ...]
"""The links of a snapshot, base first, itself last."""


def load_chain(store: SnapshotStore, tag: Tag) -> Chain:
    """Check the files of a snapshot and of its ancestors, and return where they are; blocks.

    Raises:
        StoreError: One is missing, too new or damaged.
        ChainError: One of an ancestor is, or that is not what the chain was made with.
    """
    links: list[LinkFiles] = []
    layers: list[Path] = []
    for manifest in store.load_chain(tag):
        link = parse_tag(manifest.tag)
        folder = store.folder(link)
        disk = None
        if manifest.disk_bytes:
            layers = layers or [store.rootfs(manifest.image_key)]
            layers.append(folder / LAYER_FILE)
            disk = DiskConfig(tuple(layers), manifest.disk_bytes)
        links.append(LinkFiles(link, folder / STATE_FILE, folder / MEMORY_FILE, disk))
    return tuple(links)


def open_all(paths: Iterable[Path], opened: contextlib.ExitStack) -> dict[str, int]:
    """Open files that a jailed process is to read, by their paths; blocks.

    Raises:
        HostError: One of them is gone.
        CapacityError: There are too many open files.
    """
    found = {}
    for path in paths:
        found[str(path)] = files.open_to_read(path)
        opened.callback(files.close, found[str(path)])
    return found
