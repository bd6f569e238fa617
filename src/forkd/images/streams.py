"""Read bytes forward, packed with gzip or zstd or not at all, and know their digests in the end.

All of it is somebody else's: what is unpacked at once is bounded, and so is zstd's window.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, Protocol, cast

import zstandard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

ZSTD_WINDOW_BYTES_MAX = 128 * 1024 * 1024
"""Largest window of what zstd has packed, which is memory that unpacking takes: that of `-22`."""

_READ_BYTES = 256 * 1024
_PIECE_BYTES = 1024 * 1024
_GZIP_BITS = zlib.MAX_WBITS | 16
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPED = b"\x2a\x4d\x18"
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}
MAGIC_BYTES = 6
"""How much of the beginning tells how bytes are packed."""


class Damaged(Exception):
    """What is read is not what it should be, or not understood."""


class Forward(Protocol):
    """What is read from its beginning to its end."""

    def exactly(self, count: int) -> bytes:
        """Return so many bytes; fewer only at the end."""

    def skip(self, count: int) -> None:
        """Leave out so many bytes, which may be beyond the end."""

    def pieces(self, count: int) -> Iterator[bytes]:
        """Yield the next so many bytes in pieces; fewer only at the end."""

    @property
    def position(self) -> int:
        """How many bytes were read and left out."""


class Part:
    """A part of a file, which can be read anywhere.

    Args:
        file: The file; it is read through this alone.
        offset: Where the part begins.
        size: How long it is; it may end before.
    """

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._file = file
        self._offset = offset
        self._size = size
        self._position = 0

    @property
    def position(self) -> int:
        """How many bytes were read and left out."""
        return self._position

    def exactly(self, count: int) -> bytes:
        """Return so many bytes; fewer only at the end."""
        self._file.seek(self._offset + self._position)
        found = self._file.read(max(0, min(count, self._size - self._position)))
        self._position += len(found)
        return found

    def skip(self, count: int) -> None:
        """Leave out so many bytes, which may be beyond the end."""
        self._position += count

    def pieces(self, count: int) -> Iterator[bytes]:
        """Yield the next so many bytes in pieces; fewer only at the end."""
        while count > 0 and (piece := self.exactly(min(count, _PIECE_BYTES))):
            count -= len(piece)
            yield piece


class Stream:
    """Bytes as they are unpacked, in pieces, and the digest of all that were read."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source = source
        self._rest = memoryview(b"")
        self._hash = hashlib.sha256()
        self._position = 0

    @property
    def position(self) -> int:
        """How many bytes were read and left out."""
        return self._position

    @property
    def digest(self) -> str:
        """Of all that was read and left out, and of what came with the last piece."""
        return f"sha256:{self._hash.hexdigest()}"

    def exactly(self, count: int) -> bytes:
        """Return so many bytes; fewer only at the end."""
        found = list(self._views(count))
        return bytes(found[0]) if len(found) == 1 else b"".join(found)

    def skip(self, count: int) -> None:
        """Leave out so many bytes, which may be beyond the end."""
        for _ in self._views(count):
            pass

    def pieces(self, count: int) -> Iterator[bytes]:
        """Yield the next so many bytes in pieces; fewer only at the end."""
        return map(bytes, self._views(count))

    def _views(self, count: int) -> Iterator[memoryview]:
        while count > 0:
            if not self._rest:
                piece = next(self._source, b"")
                if not piece:
                    return
                self._hash.update(piece)
                self._rest = memoryview(piece)
            view, self._rest = self._rest[:count], self._rest[count:]
            count -= len(view)
            self._position += len(view)
            yield view


class Checked:
    """A part of a file as a file, of whose bytes the digest is known in the end."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._hash = hashlib.sha256()

    def read(self, count: int) -> bytes:
        """Return at most so many bytes; none at the end."""
        data = self._part.exactly(count)
        self._hash.update(data)
        return data

    def finish(self) -> tuple[str, int]:
        """Read what is left; return the digest of everything, and how long it is."""
        while self.read(_READ_BYTES):
            pass
        return f"sha256:{self._hash.hexdigest()}", self._part.position


def is_packed(start: bytes) -> bool:
    """Whether something is packed with gzip or zstd, by its first `MAGIC_BYTES`.

    Raises:
        Damaged: It is packed with something else that is known.
    """
    for magic, name in _OTHERS.items():
        if start.startswith(magic):
            raise Damaged(f"it is packed with {name}, and not with gzip or zstd")
    return start.startswith((_GZIP, _ZSTD)) or _begins_skipped(start)


def _begins_skipped(start: bytes) -> bool:
    """Whether it begins with a frame of zstd that has no contents."""
    return start[1:4] == _ZSTD_SKIPPED and start[0] & 0xF0 == 0x50  # noqa: PLR2004 - RFC 8878


def unpacked(source: Checked) -> Iterator[bytes]:
    """Yield what a file holds, unpacked, in pieces of some MiB at most.

    Raises:
        Damaged: It is damaged, or packed in another way, or with too large a window.
    """
    start = source.read(_READ_BYTES)
    if not is_packed(start[:MAGIC_BYTES]):
        while start:
            yield start
            start = source.read(_PIECE_BYTES)
    elif start.startswith(_GZIP):
        yield from _gunzipped(source, start)
    else:
        yield from _unzstd(source, start)


def _gunzipped(source: Checked, data: bytes) -> Iterator[bytes]:
    """Unpack what may be several files of gzip behind each other, and zeros behind these."""
    try:
        while data:
            unpacker = zlib.decompressobj(_GZIP_BITS)
            while not unpacker.eof:
                if not data and not (data := source.read(_READ_BYTES)):
                    raise Damaged("what gzip has packed is cut short")
                if piece := unpacker.decompress(data, _PIECE_BYTES):
                    yield piece
                data = unpacker.unconsumed_tail
            data = (unpacker.unused_data or source.read(_READ_BYTES)).lstrip(b"\0")
            while not data and (more := source.read(_READ_BYTES)):
                data = more.lstrip(b"\0")
    except zlib.error as error:
        raise Damaged(f"what gzip has packed is damaged: {error}") from error


def _unzstd(source: Checked, data: bytes) -> Iterator[bytes]:
    try:
        unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
        behind = cast("BinaryIO", _Behind(data, source))  # of which nothing but `read` is used
        reader = unpacker.stream_reader(behind, read_across_frames=True)
        while piece := reader.read(_PIECE_BYTES):
            yield piece
    except zstandard.ZstdError as error:
        raise Damaged(f"what zstd has packed is damaged: {error}") from error


class _Behind:
    """A file whose beginning was read already."""

    def __init__(self, start: bytes, source: Checked) -> None:
        self._start = start
        self._source = source

    def read(self, count: int = _READ_BYTES) -> bytes:
        if self._start:
            data, self._start = self._start[:count], self._start[count:]
            return data
        return self._source.read(count)
