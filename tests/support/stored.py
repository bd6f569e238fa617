"""Write and read the files of a snapshot, as `protocol/store/FORMAT.md` has them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    from pathlib import Path

Members = dict[str, Any]

MAGIC = {"state": b"FKDSTATE", "memory": b"FKDMEMRY", "disk.layer": b"FKDLAYER"}
VERSION = {"state": 2, "memory": 1, "disk.layer": 1}

BLOCK_BYTES = 4096


def write_layer(path: Path, below: bytes, disk: bytes) -> None:
    """Write the blocks in which `disk` differs from what is below it."""
    starts = range(0, len(disk), BLOCK_BYTES)
    blocks = [at for at in starts if disk[at : at + BLOCK_BYTES] != below[at : at + BLOCK_BYTES]]
    runs: list[list[int]] = []
    for number in (at // BLOCK_BYTES for at in blocks):
        if runs and sum(runs[-1]) == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    body = struct.pack("<QIIQQ", len(disk), BLOCK_BYTES, 0, len(runs), len(blocks))
    body += b"".join(struct.pack("<QQ", *run) for run in runs)
    body += b"".join(disk[at : at + BLOCK_BYTES] for at in blocks)
    write_stored(path, "disk.layer", body)


def write_stored(path: Path, name: str, body: bytes) -> Members:
    digest = blake3(body)
    head = struct.pack("<8sIIQ32s", MAGIC[name], VERSION[name], 0, len(body), digest.digest())
    path.write_bytes(head + blake3(head).digest()[:8] + body)
    return {"name": name, "bytes": 64 + len(body), "digest": digest.hexdigest()}


class StoredError(Exception):
    pass


def read_stored(path: Path, name: str) -> bytes:
    raw = path.read_bytes()
    if raw[:8] != MAGIC[name] or blake3(raw[64:]).digest() != raw[24:56]:
        raise StoredError(f"{name}: its body does not match its digest")
    return raw[64:]
