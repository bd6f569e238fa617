"""Write a pack: the head at once, then every file, read once more and compared with its digest."""

from __future__ import annotations

import os
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from forkd.errors import StoreError
from forkd.packs.blocks import ZERO_BLOCK, Encoder
from forkd.packs.container import CUT, chunks_of, head_of
from forkd.packs.manifest import (
    BLOCK_BYTES,
    STORED_HEADER_BYTES,
    FileCheck,
    ImageDigest,
    PackedImage,
    PackManifest,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from forkd.packs.manifest import Entry, Link

_TABLE = struct.Struct("<QIIQQ")
_RUN_BYTES = 16
_READ_BYTES = 1024 * 1024
_ZEROS = bytes(_READ_BYTES)


@dataclass(frozen=True, slots=True)
class Source:
    """A chain to pack.

    Attributes:
        links: What its manifests say, base first.
        folders: Where the files of each link are.
        rootfs: The raw disk layer under it; None without a disk.
        descriptors: All of these files, open already, in the order of `paths_of`; None to open
            them by path.
    """

    links: tuple[Link, ...]
    folders: tuple[Path, ...]
    rootfs: Path | None
    descriptors: tuple[int, ...] | None = None


def write(source: Source) -> Iterator[bytes]:
    """Yield the bytes of an unsigned pack.

    Every file is opened before the first byte, so that removing the snapshot meanwhile does
    no harm.

    Raises:
        StoreError: A file is missing, or is not what its manifest says.
    """
    with ExitStack() as stack:
        if source.descriptors is None:
            files = [_opened(stack, path) for path in paths_of(source)]
        else:
            files = [stack.enter_context(os.fdopen(each, "rb")) for each in source.descriptors]
        image = None if source.rootfs is None else measured(files[0])
        manifest = PackManifest(links=source.links, image=image)
        yield head_of(manifest).encode()
        yield from chunks_of(_records(manifest, files))


def paths_of(source: Source) -> Iterator[Path]:
    """Yield the files of a source, in the order in which a pack has them."""
    if source.rootfs is not None:
        yield source.rootfs
    for link, folder in zip(source.links, source.folders, strict=True):
        for file in link.files:
            yield folder / file.name


def _opened(stack: ExitStack, path: Path) -> BinaryIO:
    try:
        return stack.enter_context(path.open("rb"))
    except OSError as error:
        raise StoreError(f"cannot pack {path.parent.name}/{path.name}: {error.strerror}") from error


def measured(file: BinaryIO) -> PackedImage:
    """Return length and digest of an image, which no manifest knows."""
    digest, data_bytes = ImageDigest(), 0
    while piece := file.read(_READ_BYTES):
        if data := _data_in(piece):
            digest.update(piece)
            data_bytes += data
        else:
            digest.zeros(len(piece))
    hexdigest = digest.digest().hex()
    return PackedImage(bytes=file.tell(), data_bytes=data_bytes, digest=hexdigest)


def _data_in(piece: bytes) -> int:
    """Return how much of `piece` is in blocks that are not all zeros."""
    if piece == _ZEROS[: len(piece)]:
        return 0
    blocks = (piece[at : at + BLOCK_BYTES] for at in range(0, len(piece), BLOCK_BYTES))
    return sum(len(block) for block in blocks if block != ZERO_BLOCK[: len(block)])


def _records(manifest: PackManifest, files: list[BinaryIO]) -> Iterator[bytes]:
    held: list[bytes] = []
    encoder = Encoder(held.append)
    for entry, file in zip(manifest.entries(), files, strict=True):
        prelude_bytes = 0 if entry.link is None else _prelude_bytes(file)
        file.seek(0)
        check = FileCheck(entry)
        for piece in _encoded(encoder, file, prelude_bytes):
            if piece == _ZEROS:
                check.zeros(len(piece))
            else:
                check.update(piece)
            yield from held
            held.clear()
        yield from held
        held.clear()
        yield CUT  # so that packs over one base begin with the same chunks
        _hold(manifest, entry, file.tell(), check)


def _encoded(encoder: Encoder, file: BinaryIO, prelude_bytes: int) -> Iterator[bytes]:
    """Encode one file; yields what was read."""
    prelude = file.read(prelude_bytes)
    encoder.raw(prelude)
    yield prelude
    while piece := file.read(_READ_BYTES):
        whole = len(piece) - len(piece) % BLOCK_BYTES
        encoder.blocks(piece[:whole])
        encoder.raw(piece[whole:])
        yield piece
    encoder.flush()


def _prelude_bytes(file: BinaryIO) -> int:
    """Return what is before the pages of a stored file: its header and its table of runs.

    Where there are none it does not matter: fewer blocks are found to be the same.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(STORED_HEADER_BYTES)
    table = file.read(_TABLE.size)
    if len(table) < _TABLE.size:
        return size
    _, block_bytes, reserved, runs, blocks = _TABLE.unpack(table)
    prelude = STORED_HEADER_BYTES + _TABLE.size + runs * _RUN_BYTES
    regular = block_bytes == BLOCK_BYTES and not reserved
    return prelude if regular and prelude + blocks * BLOCK_BYTES == size else 0


def _hold(manifest: PackManifest, entry: Entry, size: int, check: FileCheck) -> None:
    if size == entry.bytes and check.passed():
        return
    whose = "the image" if entry.link is None else manifest.links[entry.link].tag
    raise StoreError(f"{entry.name} of {whose} is damaged: it is not the file that was saved")
