"""Files of a COPY or an ADD as a tar archive, on their way into a machine.

They come from the context, from a heredoc, from an archive that ADD unpacks, or from the archive of
another stage's files; each gets the owner and the permissions that the step says.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from forkd.sdk._dockerfile import limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.sdk._dockerfile.context import Context, Entry
    from forkd.sdk._dockerfile.copying import Part

PIECE_BYTES = 256 * 1024
FILE_MODE = 0o644
FOLDER_MODE = 0o755

_BLOCK = tarfile.BLOCKSIZE
_PERMISSIONS = 0o7777
_DAMAGED = (tarfile.TarError, EOFError, zlib.error, OSError)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose copies are.

    Attributes:
        uid: Number of the user.
        gid: Number of the group.
    """

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Look:
    """What copies look like.

    Attributes:
        owner: Whose they are; None for whom an archive says.
        mode: Their permissions; None for those that they have.
    """

    owner: Owner | None
    mode: int | None


class Packer:
    """Makes members of one archive.

    Args:
        look: What they look like.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._folders: set[str] = set()

    def of_context(self, context: Context, part: Part, name: str) -> Iterator[bytes]:
        """Yield the members for a source in the context.

        Args:
            context: Where it is.
            part: It.
            name: What a file is called in the archive; a folder's contents are at its top.

        Raises:
            ValueError: A file is not as it was when its digest was taken, or cannot be read.
        """
        entry = part.entry
        if entry is None:
            yield from self._file(_info(name, FILE_MODE), (part.content or "").encode())
        elif part.unpacked:
            yield from self._unpacked(context.host_path(entry.path))
        elif entry.kind == "folder":
            head = len(entry.path) + 1 if entry.path else 0
            for each in context.below(entry):
                yield from self._entry(context, each, each.path[head:])
        else:
            yield from self._entry(context, entry, name)

    def of_archive(self, file: IO[bytes], name: str | None, skipped: list[str]) -> Iterator[bytes]:
        """Yield the members for what another machine has sent.

        Args:
            file: Its archive: of a file, or of a folder's contents.
            name: What the file is called; None if it is a folder's.
            skipped: Takes what that machine could not send.
        """
        with tarfile.open(fileobj=file) as archive:
            for member in archive:
                if said := member.pax_headers.get("FORKD.skipped"):
                    skipped += _skipped(said)
                else:
                    inside = member.name.removeprefix("./")
                    yield from self._member(archive, member, name or inside)

    @staticmethod
    def end() -> bytes:
        """Return what ends an archive."""
        return bytes(2 * _BLOCK)

    def _unpacked(self, path: str) -> Iterator[bytes]:
        left, count = limits.BUILD_CONTEXT_BYTES_MAX, 0
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    left, count = left - member.size, count + 1
                    if left < 0 or count > limits.BUILD_CONTEXT_ENTRIES_MAX:
                        raise ValueError(f"{path} unpacks to more than a context may hold")
                    name = member.name.lstrip("/").removeprefix("./")
                    if ".." in name.split("/"):
                        raise ValueError(f"{path} holds {member.name!r}, which leads out of it")
                    yield from self._member(archive, member, name)
        except _DAMAGED as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    def _member(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, name: str
    ) -> Iterator[bytes]:
        """Yield a member of an archive under another name."""
        name = name.rstrip("/")
        if name in {"", "."}:
            return
        info = _info(name, member.mode & _PERMISSIONS, member.mtime)
        info.uid, info.gid = member.uid, member.gid
        if member.isdir():
            yield from self._folder(info)
        elif member.issym():
            info.type, info.linkname = tarfile.SYMTYPE, member.linkname
            yield from self._header(info)
        elif (member.isreg() or member.islnk()) and (file := archive.extractfile(member)):
            info.size = file.seek(0, os.SEEK_END)
            file.seek(0)
            yield from self._header(info)
            yield from _pieces(file, info.size, name)
        else:
            raise ValueError(f"{name!r} is neither a file, a folder nor a link")

    def _entry(self, context: Context, entry: Entry, name: str) -> Iterator[bytes]:
        path = context.host_path(entry.path)
        info = _info(name, entry.mode)
        if entry.kind == "folder":
            yield from self._folder(info)
            return
        if entry.kind == "link":
            info.type, info.linkname = tarfile.SYMTYPE, entry.target
            yield from self._header(info)
            return
        if entry.kind == "other":
            raise ValueError(f"{entry.path!r} is neither a file, a folder nor a link")
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - names need not be UTF-8
                info.size, info.mtime = entry.size, int(os.fstat(file.fileno()).st_mtime)
                yield from self._header(info)
                digest = hashlib.sha256()
                for piece in _contents(file, info.size, entry.path):
                    digest.update(piece)
                    yield piece
        except OSError as error:
            raise ValueError(f"cannot read {entry.path!r}: {error.strerror}") from error
        if digest.hexdigest() != context.contents(entry):
            raise ValueError(f"{entry.path!r} was changed while it was copied")
        yield bytes(-info.size % _BLOCK)

    def _file(self, info: tarfile.TarInfo, data: bytes) -> Iterator[bytes]:
        info.size = len(data)
        yield from self._header(info)
        yield from _pieces(io.BytesIO(data), info.size, info.name)

    def _folder(self, info: tarfile.TarInfo) -> Iterator[bytes]:
        if info.name not in self._folders:
            info.type = tarfile.DIRTYPE
            yield from self._header(info)
            self._folders.add(info.name)

    def _header(self, info: tarfile.TarInfo) -> Iterator[bytes]:
        """Yield a header, behind those of folders above it that have none of their own."""
        parent = info.name.rpartition("/")[0]
        if parent and parent not in self._folders:
            yield from self._folder(_info(parent, FOLDER_MODE))
        if self._look.owner is not None:
            info.uid, info.gid = self._look.owner.uid, self._look.owner.gid
        if self._look.mode is not None and info.type != tarfile.SYMTYPE:
            info.mode = self._look.mode
        yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _skipped(record: str) -> list[str]:
    """Return what a machine says that it could not send, a line for each thing.

    Raises:
        ValueError: It says nothing that can be read.
    """
    try:
        said = json.loads(record)
        lines = [f"{each['path']}: {each['reason']}" for each in said["skipped"]]
        return [*lines, *([f"{said['more_skipped']} more"] if said["more_skipped"] else [])]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"the machine does not say what it left out: {error}") from error


def _info(name: str, mode: int, mtime: float = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = mode, max(0, int(mtime))
    return info


def _pieces(file: IO[bytes], size: int, name: str) -> Iterator[bytes]:
    """Yield so many bytes of a file, and what fills the last block; as `_contents`."""
    yield from _contents(file, size, name)
    yield bytes(-size % _BLOCK)


def _contents(file: IO[bytes], size: int, name: str) -> Iterator[bytes]:
    """Yield so many bytes of a file.

    Raises:
        ValueError: It has less.
    """
    left = size
    while left:
        piece = file.read(min(left, PIECE_BYTES))
        if not piece:
            raise ValueError(f"{name!r} became shorter while it was copied")
        left -= len(piece)
        yield piece
