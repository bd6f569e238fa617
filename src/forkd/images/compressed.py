"""Read kernel modules, which distributions compress in different ways.

Debian uses xz; Ubuntu, Arch and openSUSE use zstd, for which this host's `zstd` program is run,
because Python 3.11 cannot unpack it.
"""

from __future__ import annotations

import lzma
import zlib
from typing import TYPE_CHECKING

from forkd.errors import BuildError, HostError
from forkd.host import files, process

if TYPE_CHECKING:
    from pathlib import Path

MODULE_BYTES_MAX = 64 * 1024 * 1024
"""Largest module; those of Debian's kernel have at most 10 MiB."""

ZSTD_TIMEOUT_S = 60.0

SUFFIXES = (".xz", ".zst", ".gz")
"""How the name of a compressed module may end."""


def read_module(path: Path) -> bytes:
    """Return the module in the file `path`, unpacked.

    Raises:
        BuildError: It is damaged, too large, or packed in a way that this host cannot undo.
        HostError: It cannot be read.
    """
    data = files.read(path, MODULE_BYTES_MAX + 1)
    if data is None:
        raise BuildError(f"the kernel module {path} is missing", path=str(path))
    if path.suffix == ".zst":
        return _zstd(path)
    try:
        data = _unpacked(data, path.suffix)
    except (lzma.LZMAError, zlib.error) as error:
        raise BuildError(f"{path} is damaged: {error}", path=str(path)) from error
    if len(data) > MODULE_BYTES_MAX:
        raise BuildError(f"{path} is larger than {MODULE_BYTES_MAX} bytes", path=str(path))
    return data


def _unpacked(data: bytes, suffix: str) -> bytes:
    if suffix == ".xz":
        return lzma.LZMADecompressor().decompress(data, MODULE_BYTES_MAX + 1)
    if suffix == ".gz":
        return zlib.decompressobj(wbits=_GZIP_BITS).decompress(data, MODULE_BYTES_MAX + 1)
    return data


_GZIP_BITS = zlib.MAX_WBITS | 16


def _zstd(path: Path) -> bytes:
    if not process.installed("zstd"):
        raise BuildError(
            f"{path} is packed with zstd: install the program zstd on this host", path=str(path)
        )
    try:
        return process.run(["zstd", "-dcq", path], timeout_s=ZSTD_TIMEOUT_S).stdout
    except HostError as error:
        raise BuildError(f"{path} is damaged: {error}", path=str(path)) from error
