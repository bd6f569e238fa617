"""Unpack tar archives that come from elsewhere.

What is taken is a plain (ustar) archive of folders, regular files, and links that stay inside.
Every header is read and judged here before anything is written.  Those with which pax and GNU
archives describe the next header are refused: so there is one way to read an archive, and no few
bytes can stand for many.  `tarfile` writes what was judged, links last, so that nothing is ever
written through one, and through its `data` filter, which Python has since 3.11.4.
"""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.host.faults import NO_FILE, kernel_call

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO

_BLOCK_BYTES = tarfile.BLOCKSIZE

_FOLDER, _FILE, _LINK = "a folder", "a file", "a link"

_KINDS = {
    tarfile.DIRTYPE: _FOLDER,
    tarfile.REGTYPE: _FILE,
    tarfile.AREGTYPE: _FILE,
    tarfile.SYMTYPE: _LINK,
    tarfile.LNKTYPE: _FILE,
}

_REFUSED = {
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a FIFO",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}

_FIELD = "body"
"""What an error names as at fault: an archive is the body of a request."""


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """How much may be in an archive.

    Attributes:
        entries_max: Files, folders and links.
        path_bytes_max: Bytes of each one's path.
    """

    entries_max: int
    path_bytes_max: int


def unpack(archive: Path, folder: Path, limits: ArchiveLimits) -> None:
    """Unpack the plain tar file `archive` into the empty `folder`; blocks.

    What is left of one that is refused is the caller's to remove.

    Raises:
        InvalidRequest: It is no such archive, or holds what it may not; the entry is named.
    """
    with kernel_call(f"unpack into {folder}"), archive.open("rb") as file:
        judge(headers(file), limits)
        file.seek(0)
        try:
            _write(file, folder)
        except (tarfile.TarError, ValueError, OverflowError) as error:
            what = getattr(error, "tarinfo", None)  # a filter's error, which names paths of ours
            reason = str(error) if what is None else f"{what.name!r} leads out of the archive"
            raise _refused(f"the archive cannot be unpacked: {reason}") from error


def headers(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Give the headers of an archive.

    Raises:
        InvalidRequest: It is cut short, or holds something that is no header.
    """
    length = file.seek(0, os.SEEK_END)
    start = 0
    while True:
        file.seek(start)
        block = file.read(_BLOCK_BYTES)
        if len(block) == _BLOCK_BYTES and not any(block):
            return
        header = _header(block)
        blocks = 1 + -(-header.size // _BLOCK_BYTES)
        start += blocks * _BLOCK_BYTES
        if start > length:
            raise _refused("the archive is cut short")
        yield header


def _header(block: bytes) -> tarfile.TarInfo:
    if len(block) < _BLOCK_BYTES:
        raise _refused("the archive is cut short")
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise _refused(f"this is no tar archive: {error}") from error
    if header.type not in _KINDS:
        kind = _REFUSED.get(header.type)
        if kind is None:
            raise _refused(
                f"the archive is not plain: it has a header of the kind {header.type!r}; "
                "make it with `tar --format=ustar`"
            )
        raise _refused(f"{header.name!r} is {kind}: only files, folders and links are taken")
    if header.size < 0 or (header.size > 0 and not header.isreg()):
        raise _refused(f"{header.name!r} has a size that it cannot have")
    return header


def judge(entries: Iterable[tarfile.TarInfo], limits: ArchiveLimits) -> None:
    """Return if all entries of an archive may be unpacked.

    Raises:
        InvalidRequest: One leads out, comes twice, lies in what is no folder, or there are too
            many; the first such one is named.
    """
    top = PurePosixPath()
    kinds: dict[PurePosixPath, str] = {top: _FOLDER}
    named: set[PurePosixPath] = set()
    for number, entry in enumerate(entries, start=1):
        if number > limits.entries_max:
            raise _refused(f"the archive has more than {limits.entries_max} entries")
        path, kind = _path(entry, limits), _KINDS[entry.type]
        for above in path.parents:
            if kinds.setdefault(above, _FOLDER) != _FOLDER:
                raise _refused(f"{entry.name!r} lies in {str(above)!r}, which is no folder")
        if path == top and kind != _FOLDER:
            raise _refused("the archive has a file without a name")
        if path in named or kinds.setdefault(path, kind) != kind:
            raise _refused(f"{entry.name!r} comes twice")
        named.add(path)
        if entry.issym():
            _check_symbolic(entry, path)
        elif entry.islnk() and kinds.get(PurePosixPath(entry.linkname)) != _FILE:
            raise _refused(f"{entry.name!r} is a hard link to what is no file before it")


def _path(entry: tarfile.TarInfo, limits: ArchiveLimits) -> PurePosixPath:
    if len(entry.name.encode()) > limits.path_bytes_max:
        raise _refused(f"a path is longer than {limits.path_bytes_max} bytes: {entry.name[:80]!r}")
    path = PurePosixPath(entry.name)
    if path.is_absolute() or ".." in path.parts:
        raise _refused(f"{entry.name!r} leads out of the archive")
    return path


def _check_symbolic(entry: tarfile.TarInfo, path: PurePosixPath) -> None:
    target = os.path.normpath(path.parent / entry.linkname)
    if not entry.linkname or target.startswith(("/", "../")) or target == "..":
        raise _refused(f"{entry.name!r} is a link out of the archive, to {entry.linkname!r}")


def _write(file: BinaryIO, folder: Path) -> None:
    with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="strict") as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        entries = sorted(tar.getmembers(), key=lambda entry: (entry.issym(), entry.islnk()))
        for entry in entries:
            _make_ours(entry)
        tar.extractall(folder, members=entries)  # noqa: S202 - judged
    top = os.path.realpath(folder)
    for entry in filter(tarfile.TarInfo.issym, entries):
        try:
            target = os.path.realpath(folder / entry.name, strict=True)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            raise _refused(f"{entry.name!r} is a link to nothing") from error
        if not Path(target).is_relative_to(top):
            raise _refused(f"{entry.name!r} leads out of the archive")


def _make_ours(entry: tarfile.TarInfo) -> None:
    """Keep of owner and permissions no more than whether a file can be executed."""
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    entry.uid, entry.gid, entry.uname, entry.gname = os.geteuid(), os.getegid(), "", ""


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, field=_FIELD)
