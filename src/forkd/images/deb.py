"""Unpack files of a Debian package, without dpkg.

A package is an `ar` archive.  Its member `data.tar`, compressed or not, is a tar archive of the
files.  What is taken out of it are regular files: a kernel and its modules are nothing else.
"""

from __future__ import annotations

import io
import lzma
import tarfile
import zlib
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.host import files, folders

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import BinaryIO

    from forkd.images.steps import Build

FILE_BYTES_MAX = 512 << 20
"""Largest file that is unpacked; a kernel has 10 MB."""

FILES_MAX = 100_000
"""Most files that are unpacked of a package; Debian's kernel has 4,500 modules."""

_MAGIC = b"!<arch>\n"
_HEADER_BYTES = 60
_NAME, _SIZE, _END = slice(0, 16), slice(48, 58), b"`\n"
_DATA = ("data.tar", "data.tar.xz", "data.tar.gz", "data.tar.bz2")


def unpack(archive: Path, folder: Path, wanted: Sequence[str], build: Build) -> None:
    """Put files of a package below `folder`, which the caller removes if this fails.

    Args:
        archive: The package.
        folder: Where to, under the paths that they have in the package.
        wanted: Files, and folders with all that is in them.
        build: What it is a part of.

    Raises:
        BuildError: It is no package, or is damaged, or is compressed in a way that is not known.
    """
    with files.opened(archive) as file:
        try:
            _to_data(file, archive)
            with tarfile.open(fileobj=_Rest(file), mode="r|*") as tar:
                _write(tar, folder, wanted, build)
        except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, ValueError) as error:
            raise _damaged(archive, str(error)) from error


def _to_data(file: BinaryIO, archive: Path) -> None:
    """Read on to where the archive of files begins."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise _damaged(archive, "it is no package")
    while header := file.read(_HEADER_BYTES):
        if len(header) < _HEADER_BYTES or not header.endswith(_END):
            raise _damaged(archive, "a header is damaged")
        name, size = header[_NAME].decode("ascii").strip().rstrip("/"), int(header[_SIZE])
        if name in _DATA:
            return
        if name.startswith("data.tar"):
            raise _damaged(archive, f"its {name} is compressed in a way that is not known here")
        file.seek(size + size % 2, io.SEEK_CUR)
    raise _damaged(archive, "it has no data.tar")


class _Rest(io.RawIOBase):
    """A file from where it is; `tarfile` and `lzma` then begin at its data."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        return self._file.read(size)


def _write(tar: tarfile.TarFile, folder: Path, wanted: Sequence[str], build: Build) -> None:
    written = 0
    for entry in tar:
        path = PurePosixPath(entry.name)
        if not entry.isreg() or not any(path.is_relative_to(each) for each in wanted):
            continue
        written += 1
        if ".." in path.parts or entry.size > FILE_BYTES_MAX or written > FILES_MAX:
            raise tarfile.TarError(f"{entry.name!r} leads out of it, or is one too many or large")
        data = tar.extractfile(entry)
        folders.make((folder / path).parent)
        folders.write(folder / path, b"" if data is None else data.read())
        if written % 1000 == 0:
            build.tell("kernel", f"unpacked {written} files")


def _damaged(archive: Path, reason: str) -> BuildError:
    return BuildError(f"the package {archive.name} is damaged: {reason}", path=str(archive))
