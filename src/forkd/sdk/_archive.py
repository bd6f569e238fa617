"""Trees of this host as tar archives, and back.

What comes out of a sandbox is hostile, so an archive is read with limits and made below its folder
only: no part of a path is followed if it is a link.  Only what the guest's agent writes is read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import tarfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Self

from forkd.errors import EngineError, HostError, InvalidRequest
from forkd.sdk._local import reading, shown, status_of, writing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from forkd.wire.v2_files import ArchiveWritten

BLOCK = tarfile.BLOCKSIZE
PIECE_BYTES = 256 * 1024
PERMISSIONS = 0o777
ALL_BITS = 0o7777

RECORDS_BYTES_MAX = 64 * 1024
"""Longest extended header that is read."""

SEGMENTS_MAX = 10_000
"""Most pieces of a file with holes."""

NUMBER_CHARS_MAX = 20
"""Longest number in a map of holes."""

NUMBER_MAX = (1 << 63) - 1
"""Largest size or offset in an archive; the kernel takes none larger."""

OWNER_MAX = (1 << 32) - 2
"""Largest number of a user or a group; the one above means "leave it"."""

MTIME_MAX = (1 << 33) - 1
"""Latest time that the header of a plain tar has."""

Segments = list[tuple[int, int]]


@dataclass
class Copied:
    """What was copied between this host and a sandbox.

    Attributes:
        files: How many files and links.
        bytes: How many bytes of files.
        skipped: What was left out, a line for each: its path and the reason.
    """

    files: int = 0
    bytes: int = 0
    skipped: list[str] = field(default_factory=list)

    def skip(self, path: str, reason: object) -> None:
        """Note that something was left out."""
        why = reason.strerror if isinstance(reason, OSError) else reason
        self.skipped.append(f"{shown(path)}: {why}")

    def written(self, made: ArchiveWritten) -> None:
        """Count what a sandbox says that it left out of an archive."""
        for each in made.skipped:
            self.skip(each.path, shown(each.reason))
        if made.more_skipped:
            self.skipped.append(f"{made.more_skipped} more")
        self.files -= min(self.files, len(made.skipped) + made.more_skipped)


# From this host


def packed(
    source: str | PathLike[str], target: str, copied: Copied, *, exact: bool
) -> tuple[str, Iterator[bytes]]:
    """Return a folder in a sandbox, and the archive that, made there, is `source` at `target`.

    Raises:
        NotFound: There is no `source`.
        InvalidRequest: It is neither a file nor a folder.
        HostError: It cannot be read.
    """
    path, there = Path(source), PurePosixPath(target)
    if stat.S_ISDIR(status_of(path).st_mode):
        return target, _told(path, pack(path, copied, name=None, exact=exact))
    if not there.name:
        raise InvalidRequest(f"{target!r} does not name a file", field="target")
    return str(there.parent), _told(path, pack(path, copied, name=there.name, exact=exact))


def _told(path: Path, pieces: Iterator[bytes]) -> Iterator[bytes]:
    with reading(path):
        yield from pieces


def pack(source: Path, copied: Copied, *, name: str | None, exact: bool) -> Iterator[bytes]:
    """Yield an archive of a folder, or of one file under `name`; counts in `copied`.

    Args:
        source: What to pack; links below it are packed as links.
        copied: Takes what was packed, and what could not be.
        name: The name of the one file; None for a folder.
        exact: Keep the bits that change the user, too.
    """
    bits = ALL_BITS if exact else PERMISSIONS
    if name is not None:
        yield from _packed_file(source, name, copied, bits)
    else:
        yield _header(source.stat(), "./", tarfile.DIRTYPE, bits)
        for path, relative in _walk(source, copied):
            try:
                yield from _packed(path, relative, copied, bits)
            except OSError as error:
                copied.skip(str(path), error)
    yield bytes(2 * BLOCK)


def _walk(top: Path, copied: Copied) -> Iterator[tuple[Path, str]]:
    """Yield every path below `top`, with its name from there; a folder before what is in it."""
    waiting = [""]
    while waiting:
        relative = waiting.pop()
        path = top / relative
        if relative:
            yield path, relative
            if path.is_symlink() or not path.is_dir():
                continue
        try:
            names = sorted((each.name for each in path.iterdir()), reverse=True)
        except OSError as error:
            copied.skip(str(path), error)
            continue
        waiting += [f"{relative}/{each}" if relative else each for each in names]


def _packed(path: Path, relative: str, copied: Copied, bits: int) -> Iterator[bytes]:
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode):
        yield _header(found, relative, tarfile.DIRTYPE, bits)
    elif stat.S_ISLNK(found.st_mode):
        yield _header(found, relative, tarfile.SYMTYPE, bits, target=str(path.readlink()))
        copied.files += 1
    elif stat.S_ISREG(found.st_mode):
        yield from _packed_file(path, relative, copied, bits)
    else:
        copied.skip(str(path), "a device, a pipe or a socket")


def _packed_file(path: Path, name: str, copied: Copied, bits: int) -> Iterator[bytes]:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        segments = _segments(file.fileno(), found)
        chart = b"" if segments is None else _chart(segments)
        parts = [(0, found.st_size)] if segments is None else segments
        size = len(chart) + sum(length for _, length in parts)
        sparse = None if segments is None else found.st_size
        yield _header(found, name, tarfile.REGTYPE, bits, size=size, sparse=sparse) + chart
        for offset, length in parts:
            file.seek(offset)
            yield from _contents(file.fileno(), path, length, copied)
        yield bytes(-size % BLOCK)
    copied.files, copied.bytes = copied.files + 1, copied.bytes + size - len(chart)


def _contents(fd: int, path: Path, left: int, copied: Copied) -> Iterator[bytes]:
    """Yield the next bytes; zeros where there are none, since a header has promised them."""
    reason = None
    while left:
        wanted = min(left, PIECE_BYTES)
        data = b""
        if reason is None:
            try:
                data = os.read(fd, wanted)
                reason = None if data else "it became shorter"
            except OSError as error:
                reason = error.strerror
        data = data or bytes(wanted)
        left -= len(data)
        yield data
    if reason is not None:
        copied.skip(str(path), f"not read to its end: {reason}")


def _segments(fd: int, found: os.stat_result) -> Segments | None:
    """Return where the data of a file is; None if it has no holes."""
    size = found.st_size
    if found.st_blocks * 512 >= size:
        return None
    segments, at = Segments(), 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
            many = len(segments) + 1 == SEGMENTS_MAX
            at = size if many else min(os.lseek(fd, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno != errno.ENXIO:
                return None
            break
        segments.append((start, at - start))
    if not segments or sum(segments[-1]) < size:
        segments.append((size, 0))
    return segments


def _chart(segments: Segments) -> bytes:
    lines = [len(segments), *(number for segment in segments for number in segment)]
    text = "".join(f"{number}\n" for number in lines).encode()
    return text + bytes(-len(text) % BLOCK)


def _header(  # noqa: PLR0913 - a header has that many parts
    found: os.stat_result,
    name: str,
    kind: bytes,
    bits: int,
    *,
    target: str = "",
    size: int = 0,
    sparse: int | None = None,
) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, target, size
    member.mode, member.uid, member.gid = found.st_mode & bits, found.st_uid, found.st_gid
    member.mtime = min(max(0, int(found.st_mtime)), MTIME_MAX)
    if sparse is not None:
        member.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": name,
            "GNU.sparse.realsize": str(sparse),
        }
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


# To this host


def unpack_to(
    pieces: Iterator[bytes], target: str | PathLike[str], copied: Copied, *, exact: bool
) -> None:
    """Do what `unpack` does; what this host refuses is an error of ours.

    Raises:
        HostError: `target` cannot be made.
    """
    with writing(target):
        unpack(pieces, Path(target), copied, exact=exact)


@dataclass
class _Member:
    """One member of an archive, as far as it is of use here."""

    path: bytes
    kind: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    target: bytes
    sparse: int | None = None
    skipped: bytes = b""


class _Source:
    """The bytes of an archive, however they come."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held = b""

    def some(self, most: int) -> bytes:
        """Return the next bytes, at most `most`, and at least one."""
        while not self._held:
            piece = next(self._pieces, None)
            if piece is None:
                raise EngineError("the sandbox's archive ended in the middle")
            self._held = piece
        data, self._held = self._held[:most], self._held[most:]
        return data

    def exact(self, count: int) -> bytes:
        """Return so many bytes."""
        parts = []
        while count:
            parts.append(self.some(count))
            count -= len(parts[-1])
        return b"".join(parts)

    def skip(self, count: int) -> None:
        """Pass over so many bytes."""
        while count:
            count -= len(self.some(count))


def unpack(pieces: Iterator[bytes], target: Path, copied: Copied, *, exact: bool) -> None:
    """Make what an archive has at `target`: a folder, or one file; counts in `copied`.

    Args:
        pieces: The archive.
        target: Where.
        copied: Takes what was made, and what could not be.
        exact: Keep owners, and the bits that change the user.

    Raises:
        EngineError: It is no archive of an agent's.
        HostError: There is no room.
        OSError: `target` cannot be made.
    """
    source = _Source(pieces)
    member = _next_member(source)
    if member is None:
        raise EngineError("the sandbox sent an empty archive")
    is_file = member.kind == tarfile.REGTYPE
    with _Tree(target.parent if is_file else target, copied, exact=exact) as tree:
        while member is not None:
            if member.skipped:
                _note_skipped(member.skipped, copied)
            if is_file:
                member.path = os.fsencode(target.name)
            left = tree.add(member, source)
            source.skip(left + -member.size % BLOCK)
            member = _next_member(source)


def _next_member(source: _Source) -> _Member | None:
    records: dict[bytes, bytes] = {}
    while True:
        block = source.exact(BLOCK)
        if not any(block):
            return None
        try:
            member = _parsed(block)
            if member.kind != tarfile.XHDTYPE:
                return _with_records(member, records)
            records = _records(source, member.size)
        except ValueError as error:
            raise EngineError(f"the sandbox sent no valid archive: {error}") from error
        source.skip(-member.size % BLOCK)


def _parsed(block: bytes) -> _Member:
    if sum(block) - sum(block[148:156]) + 8 * 32 != _octal(block[148:156]):
        raise ValueError("a checksum is wrong")
    return _Member(
        path=block[:100].partition(b"\0")[0],
        kind=block[156:157],
        mode=_octal(block[100:108]) & ALL_BITS,
        uid=_octal(block[108:116]),
        gid=_octal(block[116:124]),
        size=_octal(block[124:136]),
        mtime=_octal(block[136:148]),
        target=block[157:257].partition(b"\0")[0],
    )


def _octal(digits: bytes) -> int:
    digits = digits.partition(b"\0")[0].strip() or b"0"
    if not digits.isdigit():
        raise ValueError("a number is malformed")
    return int(digits, 8)


def _records(source: _Source, size: int) -> dict[bytes, bytes]:
    if size > RECORDS_BYTES_MAX:
        raise ValueError("an extended header is too long")
    data, records, at = source.exact(size), {}, 0
    while at < len(data):
        space = data.find(b" ", at)
        end = at + _number(data[at:space])
        key, equals, value = data[space + 1 : end].partition(b"=")
        if not equals or not value.endswith(b"\n") or end > size:
            raise ValueError("a record is malformed")
        records[key] = value[:-1]
        at = end
    return records


def _with_records(member: _Member, records: dict[bytes, bytes]) -> _Member:
    member.path = records.get(b"GNU.sparse.name", records.get(b"path", member.path))
    member.target = records.get(b"linkpath", member.target)
    for key, most in (("size", NUMBER_MAX), ("uid", OWNER_MAX), ("gid", OWNER_MAX)):
        if (digits := records.get(key.encode())) is not None:
            setattr(member, key, _number(digits, most))
    if (digits := records.get(b"GNU.sparse.realsize")) is not None:
        member.sparse = _number(digits)
    member.skipped = records.get(b"FORKD.skipped", b"")
    return member


def _number(digits: bytes, most: int = NUMBER_MAX) -> int:
    if not digits.isdigit() or len(digits) > NUMBER_CHARS_MAX or int(digits) > most:
        raise ValueError("a number is malformed")
    return int(digits)


def _note_skipped(record: bytes, copied: Copied) -> None:
    try:
        said = json.loads(record)
        for each in said["skipped"]:
            copied.skip(str(each["path"]), shown(str(each["reason"])))
        if said["more_skipped"]:
            copied.skipped.append(f"{int(said['more_skipped'])} more")
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError("the sandbox does not say what it left out") from error


class _Tree:
    """Makes files below a folder, each by its own folder's descriptor."""

    def __init__(self, top: Path, copied: Copied, *, exact: bool) -> None:
        self._copied = copied
        self._left = 0
        self._exact = exact
        top.mkdir(exist_ok=True)
        self._top = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folder: tuple[list[bytes], int] = ([], os.dup(self._top))
        self._modes: list[tuple[list[bytes], int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Deepest first: what is below a folder that may not be searched is reached before.
        for parts, mode in reversed(self._modes):
            with contextlib.suppress(OSError):
                os.fchmod(self._enter(parts), mode)
        os.close(self._folder[1])
        os.close(self._top)

    def add(self, member: _Member, source: _Source) -> int:
        """Make a member; returns how many of its bytes are still to be read."""
        self._left = member.size
        try:
            self._make(member, source)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise HostError(f"{shown(os.fsdecode(member.path))}: {error.strerror}") from error
            self._copied.skip(os.fsdecode(member.path), error)
        return self._left

    def _make(self, member: _Member, source: _Source) -> None:
        parts = [part for part in member.path.split(b"/") if part not in {b"", b"."}]
        if b".." in parts or any(b"\0" in part for part in parts):
            self._copied.skip(os.fsdecode(member.path), "leads out of the folder")
        elif member.kind == tarfile.DIRTYPE:
            self._make_folder(parts, member)
        elif not parts:
            self._copied.skip(os.fsdecode(member.path), "has no name")
        elif member.kind == tarfile.SYMTYPE:
            self._make_link(parts, member)
        elif member.kind == tarfile.REGTYPE:
            self._make_file(parts, member, source)
        else:
            self._copied.skip(os.fsdecode(member.path), "neither file, folder nor link")

    def _enter(self, parts: list[bytes]) -> int:
        """Return the descriptor of a folder, which is made as far as it is missing."""
        if self._folder[0] == parts:
            return self._folder[1]
        common, here = self._folder
        if parts[: len(common)] != common:
            common, here = [], self._top
        here = os.dup(here)
        try:
            for part in parts[len(common) :]:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=here)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                inner = os.open(part, flags, dir_fd=here)
                os.close(here)
                here = inner
        except BaseException:
            os.close(here)
            raise
        os.close(self._folder[1])
        self._folder = (parts, here)
        return here

    def _bits(self, member: _Member) -> int:
        return member.mode if self._exact else member.mode & PERMISSIONS

    def _make_folder(self, parts: list[bytes], member: _Member) -> None:
        fd = self._enter(parts)
        if not parts:
            return
        if self._exact:
            os.fchown(fd, member.uid, member.gid)
        mode = self._bits(member)
        os.fchmod(fd, mode | stat.S_IRWXU)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            self._modes.append((parts, mode))

    def _make_link(self, parts: list[bytes], member: _Member) -> None:
        folder, name = self._enter(parts[:-1]), parts[-1]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        os.symlink(member.target, name, dir_fd=folder)
        if self._exact:
            os.chown(name, member.uid, member.gid, dir_fd=folder, follow_symlinks=False)
        self._copied.files += 1

    def _make_file(self, parts: list[bytes], member: _Member, source: _Source) -> None:
        folder, name = self._enter(parts[:-1]), parts[-1]
        aside = f".{secrets.token_hex(8)}.forkd-part".encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(aside, flags, 0o600, dir_fd=folder)
        try:
            self._fill(fd, member, source)
            if self._exact:
                os.fchown(fd, member.uid, member.gid)
            os.fchmod(fd, self._bits(member))
            os.utime(fd, (min(member.mtime, MTIME_MAX),) * 2)
            os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(aside, dir_fd=folder)
            raise
        finally:
            os.close(fd)
        self._copied.files += 1

    def _fill(self, fd: int, member: _Member, source: _Source) -> None:
        segments = [(0, member.size)] if member.sparse is None else self._read_chart(source)
        for offset, length in segments:
            if length > self._left:
                raise EngineError("the sandbox's map of holes is wrong")
            os.lseek(fd, offset, os.SEEK_SET)
            left = length
            while left:
                data = source.some(min(left, PIECE_BYTES))
                left, self._left = left - len(data), self._left - len(data)
                self._copied.bytes += len(data)
                while data:
                    data = data[os.write(fd, data) :]
        if member.sparse is not None:
            os.ftruncate(fd, member.sparse)

    def _read_chart(self, source: _Source) -> Segments:
        text, wanted = b"", 1
        while text.count(b"\n") < wanted:
            longest = wanted * (NUMBER_CHARS_MAX + 1)
            if self._left < BLOCK or wanted > 1 + 2 * SEGMENTS_MAX or len(text) > longest:
                raise EngineError("the sandbox's map of holes is wrong")
            text += source.exact(BLOCK)
            self._left -= BLOCK
            if wanted == 1:
                wanted = 1 + 2 * _chart_number(text.partition(b"\n")[0])
        numbers = [_chart_number(line) for line in text.split(b"\n")[:wanted]]
        return list(zip(numbers[1::2], numbers[2::2], strict=True))


def _chart_number(line: bytes) -> int:
    try:
        return _number(line)
    except ValueError as error:
        raise EngineError("the sandbox's map of holes is wrong") from error
