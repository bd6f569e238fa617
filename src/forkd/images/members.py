"""Read what a layer has in it: a tar archive, header by header, forward only.

Formats are ustar, and what GNU tar and pax write over it: long names, large numbers, extended
attributes, sparse files.  Everything is somebody else's, so each header is bounded, and what is
not understood is refused: there is one way to read an archive.
"""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from forkd.host.trees import Attributes
from forkd.images.streams import Damaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from forkd.images.streams import Forward

HEADER_BYTES_MAX = 1024 * 1024
"""Most bytes of headers before one member: its names, and the values of its attributes."""

PATH_BYTES_MAX = 4_096
"""Longest path, and longest target of a link, as in the kernel."""

SIZE_MAX = 1 << 60
"""Largest size that a member may say."""

ID_MAX = (1 << 32) - 2
"""Largest number of a user or a group."""

SECONDS_MAX = 1 << 33
"""Latest time of a file, in seconds since 1970; ext4 has no later one."""

DEVICE_MAJOR_MAX, DEVICE_MINOR_MAX = (1 << 12) - 1, (1 << 20) - 1
"""Largest numbers of a device, as in the kernel."""

EXTENTS_MAX = 65_536
"""Most pieces of one sparse file."""

XATTR_PREFIXES = ("user.",)
XATTRS = ("security.capability",)
"""Extended attributes that are kept.  Others are of the host that made the image, or of nobody."""

_BLOCK_BYTES = tarfile.BLOCKSIZE
_PAX, _PAX_GLOBAL = (b"x", tarfile.SOLARIS_XHDTYPE), b"g"
_TIME = re.compile(r"(-?)([0-9]+)(?:\.([0-9]*))?")
_XATTR = "SCHILY.xattr."
_OLD_SPARSE = tarfile.GNUTYPE_SPARSE


class Kind(Enum):
    """What a member is."""

    FOLDER = tarfile.DIRTYPE
    FILE = tarfile.REGTYPE
    SYMLINK = tarfile.SYMTYPE
    HARDLINK = tarfile.LNKTYPE
    CHARACTER_DEVICE = tarfile.CHRTYPE
    BLOCK_DEVICE = tarfile.BLKTYPE
    FIFO = tarfile.FIFOTYPE


_KINDS = {each.value: each for each in Kind} | {
    tarfile.AREGTYPE: Kind.FILE,
    tarfile.CONTTYPE: Kind.FILE,
    _OLD_SPARSE: Kind.FILE,
}


_DEVICES = (Kind.CHARACTER_DEVICE, Kind.BLOCK_DEVICE)


@dataclass(frozen=True, slots=True)
class Member:
    """Something in an archive.

    Attributes:
        name: Its path, as it is written.
        kind: What it is.
        attributes: Owner, permissions, time and extended attributes.
        size: How long it is unpacked, holes included; 0 for all but files.
        link: Where a link leads; empty for others.
        device: Numbers of a device.
        extents: Where its data is, each with offset and length; None for all in one piece.
        stored_bytes: How much of the archive is its data.
    """

    name: str
    kind: Kind
    attributes: Attributes
    size: int = 0
    link: str = ""
    device: tuple[int, int] = (0, 0)
    extents: tuple[tuple[int, int], ...] | None = None
    stored_bytes: int = 0


def members(archive: Forward) -> Iterator[Member]:
    """Yield what is in an archive; its data may be read until the next member is asked for.

    Raises:
        Damaged: It is damaged, or has something that is not understood.
    """
    while (member := _next(archive)) is not None:
        end = archive.position + member.stored_bytes
        yield member
        if archive.position > end:
            raise AssertionError("more was read than a member has")
        archive.skip(end - archive.position + -member.stored_bytes % _BLOCK_BYTES)


def _next(archive: Forward) -> Member | None:
    """Return the next member; None at the end."""
    said: dict[str, str] = {}
    left = HEADER_BYTES_MAX
    while (block := archive.exactly(_BLOCK_BYTES)) and any(block):
        header = _header(block)
        if header.type not in {
            *_PAX,
            _PAX_GLOBAL,
            tarfile.GNUTYPE_LONGNAME,
            tarfile.GNUTYPE_LONGLINK,
        }:
            return _member(archive, header, block, said)
        left -= _BLOCK_BYTES + header.size
        if left < 0:
            raise Damaged(f"{header.name[:80]!r} has more than {HEADER_BYTES_MAX} bytes of headers")
        data = archive.exactly(header.size)
        if len(data) < header.size:
            raise Damaged("it is cut short")
        archive.skip(-header.size % _BLOCK_BYTES)
        if header.type == tarfile.GNUTYPE_LONGNAME:
            said["path"] = _text(data.split(b"\0", 1)[0])
        elif header.type == tarfile.GNUTYPE_LONGLINK:
            said["linkpath"] = _text(data.split(b"\0", 1)[0])
        elif header.type in _PAX:
            said.update(_records(data))
    if said:
        raise Damaged("it ends after half a member")
    return None


def _header(block: bytes) -> tarfile.TarInfo:
    if len(block) < _BLOCK_BYTES:
        raise Damaged("it is cut short")
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError, OverflowError) as error:
        raise Damaged(f"it is no tar archive: {error}") from error
    if header.size < 0:
        raise Damaged(f"{header.name[:80]!r} has a negative size")
    return header


def _records(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the records of a pax header, each of its length, a key, `=`, a value and a newline."""
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 20)
        digits = data[at:space] if space > 0 else b""
        end = at + int(digits) if digits.isdigit() else 0
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not space < end <= len(data) or data[end - 1 : end] != b"\n" or not equals:
            raise Damaged("a pax header makes no sense")
        yield _text(key), _text(value)
        at = end


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _member(
    archive: Forward, header: tarfile.TarInfo, block: bytes, said: Mapping[str, str]
) -> Member:
    name = said.get("GNU.sparse.name") or said.get("path") or header.name
    kind = _KINDS.get(header.type)
    if kind is None:
        raise Damaged(f"{name[:80]!r} is of a kind that forkd does not know: {header.type!r}")
    if kind is Kind.FILE and "path" in said and name.endswith("/"):
        kind = Kind.FOLDER  # as in a header without a longer name, which tarfile has read
    link = (
        (said.get("linkpath") or header.linkname) if kind in {Kind.SYMLINK, Kind.HARDLINK} else ""
    )
    for path in (name, link):
        if len(path.encode("utf-8", "surrogateescape")) > PATH_BYTES_MAX:
            raise Damaged(f"a path is longer than {PATH_BYTES_MAX} bytes: {path[:80]!r}")
        if "\0" in path:
            raise Damaged(f"a path has a NUL: {path[:80]!r}")
    attributes = Attributes(
        mode=header.mode & 0o7777,
        uid=_number(said, "uid", header.uid, ID_MAX),
        gid=_number(said, "gid", header.gid, ID_MAX),
        mtime_ns=_time_ns(said.get("mtime"), header.mtime),
        xattrs=_xattrs(said),
    )
    if kind is not Kind.FILE:
        device = _device(name, header) if kind in _DEVICES else (0, 0)
        return Member(name, kind, attributes, link=link, device=device)
    stored = _number(said, "size", header.size, SIZE_MAX)
    size, extents = stored, None
    if header.type == _OLD_SPARSE:
        size, extents = _old_sparse(archive, block)
    elif any(key.startswith("GNU.sparse.") for key in said):
        before = archive.position
        size, extents = _pax_sparse(archive, said, stored)
        stored -= archive.position - before
    if extents is not None:
        _check_extents(name, extents, size, stored)
    return Member(name, kind, attributes, size, extents=extents, stored_bytes=stored)


def _device(name: str, header: tarfile.TarInfo) -> tuple[int, int]:
    major, minor = header.devmajor, header.devminor
    if not (0 <= major <= DEVICE_MAJOR_MAX and 0 <= minor <= DEVICE_MINOR_MAX):
        raise Damaged(f"{name[:80]!r} is a device with the numbers {major} and {minor}")
    return major, minor


def _number(said: Mapping[str, str], key: str, default: int, most: int) -> int:
    text = said.get(key)
    if text is not None and not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        raise Damaged(f"{key} is {text[:80]!r}")
    number = default if text is None else int(text)
    if not 0 <= number <= most:
        raise Damaged(f"{key} is {number}")
    return number


def _time_ns(text: str | None, default: float) -> int:
    """Return a time in nanoseconds since 1970; 0 for one that no file can have."""
    match = _TIME.fullmatch(str(int(default)) if text is None else text)
    if match is None:
        raise Damaged(f"mtime is {(text or '')[:80]!r}")
    sign, seconds, fraction = match.groups()
    if len(seconds) > len(str(SECONDS_MAX)) or int(seconds) > SECONDS_MAX:
        return 0
    time_ns = int(seconds) * 10**9 + int((fraction or "")[:9].ljust(9, "0"))
    return -time_ns if sign else time_ns


def _xattrs(said: Mapping[str, str]) -> tuple[tuple[str, bytes], ...]:
    found = []
    for key, value in said.items():
        name = key.removeprefix(_XATTR)
        if name != key and (name in XATTRS or name.startswith(XATTR_PREFIXES)):
            if "\0" in name:
                raise Damaged(f"an attribute is called {name[:80]!r}")
            found.append((name, value.encode("utf-8", "surrogateescape")))
    return tuple(found)


def _old_sparse(archive: Forward, block: bytes) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Read the map of a sparse file as GNU tar has it outside of pax headers."""
    extents, more = _pairs(block, 386, 4), block[482]
    size = _nti(block[483:495])
    while more:
        block = archive.exactly(_BLOCK_BYTES)
        if len(block) < _BLOCK_BYTES or len(extents) > EXTENTS_MAX:
            raise Damaged("the map of a sparse file is cut short, or too long")
        extents += _pairs(block, 0, 21)
        more = block[504]
    return size, tuple(extents)


def _pairs(block: bytes, at: int, count: int) -> list[tuple[int, int]]:
    pairs = []
    for start in range(at, at + 24 * count, 24):
        if not block[start]:
            break
        pairs.append((_nti(block[start : start + 12]), _nti(block[start + 12 : start + 24])))
    return pairs


def _nti(field: bytes) -> int:
    """Return a number of a header."""
    try:
        return int(tarfile.nti(field))  # type: ignore[attr-defined]
    except tarfile.HeaderError as error:
        raise Damaged(f"the map of a sparse file makes no sense: {error}") from error


def _pax_sparse(
    archive: Forward, said: Mapping[str, str], stored: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Read the map before the data of a sparse file, as of version 1.0 of GNU tar's format."""
    if (said.get("GNU.sparse.major"), said.get("GNU.sparse.minor")) != ("1", "0"):
        raise Damaged("a sparse file is in another format than version 1.0 of GNU tar's")
    size = _number(said, "GNU.sparse.realsize", -1, SIZE_MAX)
    numbers: list[int] = []
    rest, wanted = b"", 1
    begin = archive.position
    while len(numbers) < wanted:
        line, newline, after = rest.partition(b"\n")
        if not newline:
            if archive.position - begin + _BLOCK_BYTES > min(stored, 48 * EXTENTS_MAX):
                raise Damaged("the map of a sparse file is cut short, or too long")
            block = archive.exactly(_BLOCK_BYTES)
            if not block:
                raise Damaged("it is cut short")
            rest += block
            continue
        if not line.isdigit() or len(line) > len(str(SIZE_MAX)):
            raise Damaged("the map of a sparse file makes no sense")
        numbers.append(int(line))
        rest = after
        if len(numbers) == 1:
            wanted = 1 + 2 * numbers[0]
    return size, tuple(zip(numbers[1::2], numbers[2::2], strict=True))


def _check_extents(name: str, extents: tuple[tuple[int, int], ...], size: int, stored: int) -> None:
    end = total = 0
    for offset, length in extents:
        if offset < end or length < 0:
            raise Damaged(f"the map of the sparse file {name[:80]!r} makes no sense")
        end, total = offset + length, total + length
    if not end <= size <= SIZE_MAX or total != stored:
        raise Damaged(f"the map of the sparse file {name[:80]!r} makes no sense")
