"""The kernel can read our archives, and the same entries give the same bytes."""

from __future__ import annotations

import stat

from forkd.images import cpio


def read(data: bytes) -> list[cpio.Entry]:
    """Read an archive as the kernel's unpacker does, field by field."""
    entries: list[cpio.Entry] = []
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name_length, size = fields[11], fields[6]
        start = at + 110
        name = data[start : start + name_length - 1].decode()
        body = (start + name_length + 3) & ~3
        if name == "TRAILER!!!":
            return entries
        entry = cpio.Entry(name, fields[1], data[body : body + size], (fields[9], fields[10]))
        entries.append(entry)
        at = (body + size + 3) & ~3


def test_what_was_written_is_read() -> None:
    entries = [
        cpio.folder("dev"),
        cpio.character("dev/console", 5, 1),
        cpio.regular("init", b"12345", 0o755),
        cpio.regular("empty", b""),
    ]

    assert read(cpio.archive(entries)) == entries


def test_an_archive_is_whole_blocks_of_512_bytes() -> None:
    assert all(len(cpio.archive([cpio.regular("x", bytes(n))])) % 512 == 0 for n in range(9))


def test_kinds_and_permissions_are_in_the_mode() -> None:
    assert stat.filemode(cpio.folder("a").mode) == "drwxr-xr-x"
    assert stat.filemode(cpio.character("a", 1, 3).mode) == "crw-------"
    assert stat.filemode(cpio.regular("a", b"", 0o755).mode) == "-rwxr-xr-x"
