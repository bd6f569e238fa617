"""Tar archives, good and hostile, made by hand."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def entry(
    name: str,
    data: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
    mode: int = 0o644,
) -> bytes:
    """Return one entry: its header and its padded contents."""
    header = tarfile.TarInfo(name)
    header.type, header.linkname, header.size, header.mode = kind, link, len(data), mode
    return header.tobuf(tarfile.USTAR_FORMAT) + padded(data)


def padded(data: bytes) -> bytes:
    """Return `data` with zeros up to the next block."""
    return data + bytes(-len(data) % tarfile.BLOCKSIZE)


def archive(*entries: bytes) -> bytes:
    """Return a whole archive."""
    return b"".join(entries) + bytes(2 * tarfile.BLOCKSIZE)


def folder(name: str) -> bytes:
    """Return the entry of a folder."""
    return entry(name, kind=tarfile.DIRTYPE, mode=0o755)


def symbolic(name: str, target: str) -> bytes:
    """Return the entry of a symbolic link."""
    return entry(name, kind=tarfile.SYMTYPE, link=target)


def hard(name: str, target: str) -> bytes:
    """Return the entry of a hard link."""
    return entry(name, kind=tarfile.LNKTYPE, link=target)


def of_tarfile(names: Iterable[str], form: int) -> bytes:
    """Return an archive of empty files as `tarfile` makes it."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    return made.getvalue()


RECIPE = b'name = "uploaded"\nimage = { debian = {} }\n'

TOML = entry("recipe.toml", RECIPE)
"""The entry without which an archive is of no recipe."""

LONG = "a/" * 127 + "b"
"""A path of the greatest length: 255 bytes."""


def _sparse() -> bytes:
    return entry("sparse", kind=tarfile.GNUTYPE_SPARSE)


def _huge() -> bytes:
    """Return a header that says that its file has 2 EiB."""
    header = tarfile.TarInfo("huge")
    header.size = 1 << 61
    return header.tobuf(tarfile.GNU_FORMAT)


def _negative() -> bytes:
    """Return a header of a file of -512 bytes, which leads a careless reader back to itself."""
    header = tarfile.TarInfo("negative")
    header.size = -512
    return header.tobuf(tarfile.GNU_FORMAT)


HOSTILE = {
    "parent": (archive(entry("../x")), "leads out"),
    "parent-within": (archive(entry("a/../../x")), "leads out"),
    "absolute": (archive(entry("/tmp/x")), "leads out"),
    "link-parent": (archive(symbolic("x", "../x")), "link out"),
    "link-deep": (archive(folder("a"), symbolic("a/x", "../../x")), "link out"),
    "link-absolute": (archive(symbolic("x", "/etc/passwd")), "link out"),
    "link-through-links": (
        archive(folder("a"), folder("a/b"), symbolic("l", "a/b"), symbolic("m", "l/../../..")),
        "link out",
    ),
    "link-by-a-link": (
        archive(
            folder("a"), folder("a/b"), symbolic("a/b/up", ".."), symbolic("m", "a/b/up/../..")
        ),
        "leads out",
    ),
    "link-to-nothing": (archive(symbolic("x", "nothing")), "link to nothing"),
    "link-to-itself": (archive(symbolic("x", "x")), "link to nothing"),
    "link-empty": (archive(symbolic("x", "")), "link out"),
    "file-behind-a-link": (archive(symbolic("x", "a"), folder("a"), entry("x/y")), "no folder"),
    "link-over-a-folder": (archive(entry("x/y"), symbolic("x", "a")), "comes twice"),
    "hard-link-out": (archive(hard("x", "/etc/passwd")), "hard link to what is no file"),
    "hard-link-parent": (archive(hard("x", "../x")), "hard link to what is no file"),
    "hard-link-to-a-link": (
        archive(entry("a"), symbolic("b", "a"), hard("x", "b")),
        "hard link to what is no file",
    ),
    "hard-link-before-its-file": (archive(hard("x", "a"), entry("a")), "hard link"),
    "device": (archive(entry("x", kind=tarfile.CHRTYPE)), "is a device"),
    "block-device": (archive(entry("x", kind=tarfile.BLKTYPE)), "is a device"),
    "FIFO": (archive(entry("x", kind=tarfile.FIFOTYPE)), "is a FIFO"),
    "sparse": (archive(_sparse()), "is a sparse file"),
    "twice": (archive(entry("x"), entry("x")), "comes twice"),
    "twice-in-other-words": (archive(entry("a/x"), entry("./a//x")), "comes twice"),
    "folder-twice": (archive(folder("a"), folder("a/")), "comes twice"),
    "file-as-folder": (archive(entry("a"), entry("a/b")), "no folder"),
    "no-name": (archive(entry("")), "without a name"),
    "huge": (archive(_huge()), "cut short"),
    "negative": (archive(_negative()), "a size that it cannot have"),
    "sized-folder": (archive(entry("a", b"x", kind=tarfile.DIRTYPE)), "a size that it cannot have"),
    "pax": (of_tarfile(["x" * 200], tarfile.PAX_FORMAT), "not plain"),
    "gnu-long-name": (of_tarfile(["x" * 200], tarfile.GNU_FORMAT), "not plain"),
    "not-text": (archive(entry("x").replace(b"x\0", b"\xff\0", 1)), "no tar archive"),
    "no-archive": (b"<html>" * 1_000, "no tar archive"),
    "compressed": (b"\x1f\x8b\x08" + bytes(range(256)) * 4, "no tar archive"),
    "empty": (b"", "cut short"),
    "half-a-header": (entry("x")[:100], "cut short"),
    "half-a-file": (entry("x", b"y" * 4_096)[:-1_024], "cut short"),
    "no-end": (entry("x"), "cut short"),
}
"""Archives that must not be unpacked, and what is said of them."""


def unpacked(data: bytes) -> dict[str, bytes]:
    """Return the files of an archive, by name."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = [each for each in archive.getmembers() if each.isfile()]
        return {each.name: archive.extractfile(each).read() for each in files}  # type: ignore[union-attr]
