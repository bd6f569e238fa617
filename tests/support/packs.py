"""Chains of stored files, and packs that are not what they should be, for tests of packs."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zstandard
from blake3 import blake3

from forkd.host.cells import Cell
from forkd.packs import keys
from forkd.packs.blocks import RECORD, Kind
from forkd.packs.container import MAGIC, read_head
from forkd.packs.manifest import BLOCK_BYTES, Cpu, Link, PackedFile
from forkd.packs.reader import Terms
from forkd.packs.writer import Source, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from forkd.packs.manifest import Device, FileName

SECRET = bytes(range(32))
PUBLIC = keys.public_of(SECRET)
ANYBODY = Terms(trusted=(), allow_unsigned=True, room_bytes=1 << 30)
MEMORY_BYTES = 1 << 20
DISK_BYTES = 1 << 20
DEVICES: tuple[Device, ...] = ("serial", "vmgenid", "block", "net", "vsock", "rng")

MAGICS: dict[str, bytes] = {
    "state": b"FKDSTATE",
    "memory": b"FKDMEMRY",
    "disk.layer": b"FKDLAYER",
}
VERSION = {"state": 2, "memory": 1, "disk.layer": 1}


def block(word: str) -> bytes:
    """Return a block that is like no other word's."""
    return (word.encode() * BLOCK_BYTES)[:BLOCK_BYTES]


def write_stored(path: Path, name: FileName, body: bytes) -> PackedFile:
    """Write a stored file with its header; return what a manifest says of it."""
    digest = blake3(body)
    head = struct.pack("<8sIIQ32s", MAGICS[name], VERSION[name], 0, len(body), digest.digest())
    path.write_bytes(head + blake3(head).digest()[:8] + body)
    return PackedFile(name=name, bytes=64 + len(body), digest=digest.hexdigest())


def pages(*blocks: bytes) -> bytes:
    """Return the body of a memory file or a layer with every second page or block set."""
    table = struct.pack("<QIIQQ", MEMORY_BYTES, BLOCK_BYTES, 0, len(blocks), len(blocks))
    runs = b"".join(struct.pack("<QQ", 2 * number, 1) for number in range(len(blocks)))
    return table + runs + b"".join(blocks)


def a_link(folder: Path, tag: str, parent: str | None, *, disk: bool = True) -> Link:
    """Write the files of one link into `folder`; pages `same` are in every one."""
    folder.mkdir(parents=True)
    files = [
        write_stored(folder / "state", "state", f"state of {tag}".encode() * 100),
        write_stored(folder / "memory", "memory", pages(block("same"), block(tag), bytes(4096))),
    ]
    if disk:
        layer = pages(block("same"), block(f"disk of {tag}"))
        files.append(write_stored(folder / "disk.layer", "disk.layer", layer))
    return Link(
        tag=tag,
        parent=parent,
        created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        recipe="python-numpy",
        image_key="key",
        kernel=f"6.1.0-40-amd64_6.1.153-1@sha256:{'5' * 64}",
        vcpus=2,
        memory_bytes=MEMORY_BYTES,
        disk_bytes=DISK_BYTES if disk else 0,
        runtime="python",
        cpu=Cpu(model="A CPU @ 2.5 GHz", features=("sse", "avx2")),
        devices=DEVICES,
        files=tuple(files),
    )


def a_chain(folder: Path, links: int = 1, *, disk: bool = True) -> Source:
    """Write a chain of `links` snapshots called `t0`, `t1`, ..."""
    made = [
        a_link(folder / f"t{n}", f"t{n}", f"t{n - 1}" if n else None, disk=disk)
        for n in range(links)
    ]
    rootfs = folder / "rootfs.ext4" if disk else None
    if rootfs is not None:
        rootfs.write_bytes(block("root") + bytes(64 * BLOCK_BYTES) + block("same") + b"tail")
    return Source(tuple(made), tuple(folder / link.tag for link in made), rootfs)


def a_pack(folder: Path, links: int = 1) -> bytes:
    """Return an unsigned pack of a chain."""
    return b"".join(write(a_chain(folder, links)))


def signed(pack: bytes, secret: bytes = SECRET) -> bytes:
    """Return `pack` with a signature instead of the one it has."""
    source = io.BytesIO(pack)
    head = read_head(source).signed(secret)
    return head.encode() + source.read()


def forged(pack: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return `pack` with a changed manifest, unsigned, however wrong that makes it."""
    (length,) = struct.unpack_from("<I", pack, 12)
    said = json.loads(pack[16 : 16 + length])
    change(said)
    return framed(json.dumps(said).encode()) + pack[16 + length + 96 :]


def framed(manifest: bytes) -> bytes:
    """Return an unsigned head around any bytes."""
    return MAGIC + struct.pack("<II", 1, len(manifest)) + manifest + bytes(96)


def head_bytes(pack: bytes) -> int:
    """Return where the chunks of `pack` begin."""
    (length,) = struct.unpack_from("<I", pack, 12)
    return int(16 + length + 96)


def with_records(pack: bytes, records: Iterable[bytes]) -> bytes:
    """Return the head of `pack` in front of other records."""
    return pack[: head_bytes(pack)] + chunk(b"".join(records)) + bytes(8)


def chunk(data: bytes) -> bytes:
    """Return one chunk."""
    stored = zstandard.ZstdCompressor().compress(data)
    return struct.pack("<II", len(stored), len(data)) + stored


def record(kind: Kind | int, first: int, second: int = 0, data: bytes = b"") -> bytes:
    """Return one record."""
    return RECORD.pack(kind, first, second) + data


class OneCell:
    """Cells of which one is always free, in which nothing is run."""

    @staticmethod
    def pack() -> contextlib.AbstractContextManager[Cell]:
        """Give the cell."""
        return contextlib.nullcontext(Cell(Path("none-such"), 1))


def open_below(folder: Path) -> list[Path]:
    """Return which files below a folder this process has open."""
    opened = (path.resolve() for path in Path("/proc/self/fd").iterdir())
    return [path for path in opened if path.is_relative_to(folder)]
