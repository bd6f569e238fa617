"""Read a pack from anywhere into an empty folder, believing nothing that it says.

What the pack calls a file never becomes a path: there are `rootfs.ext4`, and in a folder for
each link, `0` for the base, the three names that a stored file can have.  Nothing else is made,
no file grows over its declared length, and one that does not match its digest ends the reading.
The folder is the caller's to remove.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import CapacityError, PackError
from forkd.packs.blocks import RECORD, Kind, Places
from forkd.packs.container import Pieces, check_trust, contents, read_head
from forkd.packs.manifest import BLOCK_BYTES, FileCheck

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from forkd.packs.container import Head, Readable
    from forkd.packs.manifest import Entry

_KINDS = frozenset(Kind)
_PIECE_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms a pack is taken.

    Attributes:
        trusted: Public keys whose signature is believed.
        allow_unsigned: Whether a pack that is unsigned, or signed by another key, is taken too.
        room_bytes: How much its files may take on the disk.
    """

    trusted: tuple[bytes, ...]
    allow_unsigned: bool
    room_bytes: int


def read(source: Readable, folder: Path, terms: Terms) -> Head:
    """Read a pack to its end into `folder`, and check everything in it.

    Raises:
        PackError: It is damaged, hostile, unsigned or not trusted; `context["reason"]` says
            which.
        CapacityError: The disk has no room for it.
    """
    head = read_head(source)
    check_trust(head, terms.trusted, allow_unsigned=terms.allow_unsigned)
    if head.manifest.data_bytes > terms.room_bytes:
        raise CapacityError(
            f"the pack needs {head.manifest.data_bytes} bytes, there are {terms.room_bytes}"
        )
    try:
        _read_files(source, folder, head)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise CapacityError("no space is left for the pack") from error
        raise
    return head


def _read_files(source: Readable, folder: Path, head: Head) -> None:
    pieces = contents(source)
    records = Pieces(pieces)
    with ExitStack() as stack:
        reader = _Reader(records)
        for entry in head.manifest.entries():
            path = path_of(folder, entry)
            path.parent.mkdir(exist_ok=True, mode=0o700)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, file)
            reader.read_file(file, entry, _label(head, entry))
    if records.read(1):
        raise PackError("the pack holds more than its manifest declares", reason="undeclared")


def path_of(folder: Path, entry: Entry) -> Path:
    """Return where a file of a pack is after it was read into `folder`."""
    return folder / entry.name if entry.link is None else folder / str(entry.link) / entry.name


def _label(head: Head, entry: Entry) -> str:
    if entry.link is None:
        return "the image"
    return f"{entry.name} of {head.manifest.links[entry.link].tag}"


class _Reader:
    """Writes one file after another from records; knows where each numbered block went."""

    def __init__(self, records: Pieces) -> None:
        self._records = records
        self._places = Places()

    def read_file(self, file: int, entry: Entry, label: str) -> None:
        """Write the file `entry` from the next records."""
        check, position, data_left = FileCheck(entry), 0, entry.data_bytes
        while position < entry.bytes:
            kind, length, number = self._record(label)
            if length > entry.bytes - position:
                raise PackError(f"{label} is longer than the pack declares", reason="length")
            if kind is not Kind.ZEROS:
                data_left -= length
            if data_left < 0:
                raise PackError(f"{label} has more data than the pack declares", reason="length")
            if kind is Kind.BLOCKS:
                self._places.add(file, position, length // BLOCK_BYTES)
            if kind is Kind.ZEROS:
                check.zeros(length)
                position += length
                continue
            for piece in self._pieces(kind, length, number, label):
                _write(file, piece, position)
                check.update(piece)
                position += len(piece)
        os.ftruncate(file, entry.bytes)
        if not check.passed():
            raise PackError(f"{label} does not match its digest", reason="digest")

    def _record(self, label: str) -> tuple[Kind, int, int]:
        """Return the next record: its kind, how many bytes it makes, and its number."""
        raw = self._records.read(RECORD.size)
        if len(raw) < RECORD.size:
            raise PackError(f"the pack ends in {label}", reason="truncated")
        code, count, number = RECORD.unpack(raw)
        if code not in _KINDS or not count or (number and code != Kind.COPY):
            raise PackError(f"the pack is damaged: a record in {label}", reason="damaged")
        kind = Kind(code)
        if kind is Kind.COPY and number + count > self._places.count:
            raise PackError(
                f"the pack is damaged: {label} copies a block that did not come", reason="damaged"
            )
        return kind, count if kind is Kind.BYTES else count * BLOCK_BYTES, number

    def _pieces(self, kind: Kind, length: int, number: int, label: str) -> Iterator[bytes]:
        if kind is Kind.COPY:
            yield from self._copied(number, length // BLOCK_BYTES)
            return
        left = length
        while left:
            size = min(left, _PIECE_BLOCKS * BLOCK_BYTES)
            piece = self._records.read(size)
            if len(piece) < size:
                raise PackError(f"the pack ends in {label}", reason="truncated")
            yield piece
            left -= size

    def _copied(self, number: int, count: int) -> Iterator[bytes]:
        while count:
            file, offset, found = self._places.find(number, min(count, _PIECE_BLOCKS))
            yield os.pread(file, found * BLOCK_BYTES, offset)
            number, count = number + found, count - found


def _write(file: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written
