"""Unpack an image in files: lay its layers over each other, and write what they make once.

Runs as root of a namespace without a network (`forkd.images.namespace`).  Contents are written
while a layer is read, and get their paths when every digest was compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.host import files, folders
from forkd.host.trees import Contents, Pool, plant
from forkd.images import manifests
from forkd.images.members import Kind, members
from forkd.images.stored import open_stored
from forkd.images.streams import Checked, Damaged, Part, Stream, unpacked
from forkd.images.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forkd.images.members import Member
    from forkd.images.stored import Blob, Source

ENTRIES_MAX = 1_000_000
"""Most names in all layers of an image together."""

TRAILER_BYTES_MAX = 1024 * 1024
"""Most bytes of a layer behind the end of its archive, which are padding."""

ARCHIVE_NAME = "archive"

ROOTFS_NAME, CONFIG_NAME = "rootfs", "config.json"
"""What an image is unpacked to, in a folder: its files, and its configuration as it is written."""


@dataclass(frozen=True, slots=True)
class LayerLimits:
    """How much all layers of an image may hold together.

    Attributes:
        bytes_max: Bytes of its files.
        entries_max: Names.
    """

    bytes_max: int
    entries_max: int = ENTRIES_MAX


def unpack(source: Source, folder: Path, limits: LayerLimits, tell: Callable[[float], None]) -> int:
    """Unpack an image; return how many bytes its layers hold.

    Args:
        source: Where it is.
        folder: A new folder for `ROOTFS_NAME` and `CONFIG_NAME`.
        limits: How much may be in it.
        tell: Is told how much of the work is done.

    Raises:
        BuildError: It is damaged, was changed, holds too much, or is not for Linux on amd64.
        HostError: It cannot be read or written.
    """
    files.make_folder(folder)
    bytes_max = limits.bytes_max
    stored = open_stored(source, folder / ARCHIVE_NAME, bytes_max=bytes_max)
    manifests.parse_config(stored.config)
    folders.write(folder / CONFIG_NAME, stored.config)
    diff_ids = manifests.parse_diff_ids(stored.config, len(stored.layers))
    total = sum(layer.size for layer in stored.layers)
    if total > manifests.stored_bytes_max(bytes_max):
        raise _too_much(bytes_max)
    layers = _Layers(Pool(folder / "pool"), limits)
    done = 0
    for blob, diff_id in zip(stored.layers, diff_ids, strict=True):
        layers.lay(blob, diff_id)
        done += blob.size
        tell(done / total if total else 1.0)
    plant(folder / ROOTFS_NAME, layers.pool, layers.tree.entries())
    layers.pool.remove()
    files.remove_file(folder / ARCHIVE_NAME)
    return bytes_max - layers.bytes_left


class _Layers:
    """The layers so far.

    Args:
        pool: Where their files are.
        limits: How much they may hold together.
    """

    def __init__(self, pool: Pool, limits: LayerLimits) -> None:
        self.pool = pool
        self.tree = Tree(limits.entries_max)
        self.bytes_left = self._bytes_max = limits.bytes_max
        self._files = 0

    def lay(self, blob: Blob, diff_id: str) -> None:
        """Lay one over those below.

        Args:
            blob: Where it is.
            diff_id: Its digest unpacked.
        """
        self.tree.next_layer()
        try:
            with files.opened(blob.path) as file:
                source = Checked(Part(file, blob.offset, blob.size))
                unpacked_as = self._read(Stream(unpacked(source)))
                digest, size = source.finish()
        except Damaged as error:
            raise BuildError(f"a layer of the image cannot be read: {error}") from error
        if size != blob.size or blob.digest not in {None, digest}:
            raise BuildError(f"a part of the image was changed: {blob.digest} has another digest")
        if unpacked_as != diff_id:
            raise BuildError(
                f"a layer is not what the configuration says: it unpacks to {unpacked_as}, and "
                f"not to {diff_id}"
            )

    def _read(self, layer: Stream) -> str:
        """Read what a layer has; return its digest."""
        for member in members(layer):
            self._add(member, layer)
        if sum(map(len, layer.pieces(TRAILER_BYTES_MAX + 1))) > TRAILER_BYTES_MAX:
            raise Damaged(f"more than {TRAILER_BYTES_MAX} bytes are behind the end of its archive")
        return layer.digest

    def _add(self, member: Member, layer: Stream) -> None:
        number = None
        if member.kind is Kind.FILE:
            self.bytes_left -= member.size
            if self.bytes_left < 0:
                raise _too_much(self._bytes_max)
            number = self._files
            self._files += 1
        self.tree.add(member, number)
        if number is not None:
            name, pieces = member.name[:80], layer.pieces(member.stored_bytes)
            contents = Contents(pieces, member.size, member.extents)
            if self.pool.write(number, name, member.attributes, contents) < member.stored_bytes:
                raise Damaged(f"it is cut short, in {name!r}")


def _too_much(bytes_max: int) -> BuildError:
    return BuildError(f"the image's layers hold more than {bytes_max} bytes")
