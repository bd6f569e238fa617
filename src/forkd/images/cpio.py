"""Write a cpio archive as the kernel reads one: "newc", the same bytes for the same entries.

Owners are root and times are zero, whatever the files at hand say; so the archive of an
initramfs depends on its contents alone, and no privilege is needed to put a device in it.
The format: Documentation/driver-api/early-userspace/buffer-format.rst in the kernel.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass

_ALIGN = 4
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in an archive.

    Attributes:
        name: Its path, without a leading slash.
        mode: Its kind and permissions, as `stat` has them.
        data: Contents of a file, or target of a symbolic link.
        device: Major and minor number of a device.
    """

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def folder(name: str, mode: int = 0o755) -> Entry:
    """Return an entry for a folder."""
    return Entry(name, stat.S_IFDIR | mode)


def regular(name: str, data: bytes, mode: int = 0o644) -> Entry:
    """Return an entry for a file."""
    return Entry(name, stat.S_IFREG | mode, data)


def character(name: str, major: int, minor: int, mode: int = 0o600) -> Entry:
    """Return an entry for a character device."""
    return Entry(name, stat.S_IFCHR | mode, device=(major, minor))


def archive(entries: list[Entry]) -> bytes:
    """Return the archive of `entries`, in their order; a folder goes before what is in it."""
    parts = [_encoded(number, entry) for number, entry in enumerate(entries, start=1)]
    parts.append(_encoded(0, Entry("TRAILER!!!", 0)))
    whole = b"".join(parts)
    return whole + bytes(-len(whole) % _BLOCK)


def _encoded(number: int, entry: Entry) -> bytes:
    name = entry.name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    owner, time, check = 0, 0, 0
    fields = (
        *(number, entry.mode, owner, owner, links, time, len(entry.data)),
        *(0, 0, *entry.device, len(name), check),
    )
    header = b"070701" + b"".join(b"%08X" % value for value in fields)
    return _padded(header + name) + _padded(entry.data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGN)
