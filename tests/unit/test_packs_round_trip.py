"""What was packed comes out as it was, once per distinct block, and signed if it was signed."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from blake3 import blake3

from forkd.errors import StoreError
from forkd.packs import limits
from forkd.packs.blocks import Encoder, Kind, Places
from forkd.packs.container import Pieces, contents, read_head
from forkd.packs.manifest import BLOCK_BYTES, ImageDigest
from forkd.packs.reader import read
from forkd.packs.writer import write
from tests.support.packs import ANYBODY, PUBLIC, a_chain, a_pack, block, head_bytes, signed

if TYPE_CHECKING:
    from pathlib import Path


def test_a_chain_comes_out_byte_for_byte(tmp_path: Path) -> None:
    source = a_chain(tmp_path / "in", 3)
    (out := tmp_path / "out").mkdir()

    head = read(io.BytesIO(b"".join(write(source))), out, ANYBODY)

    assert head.manifest.links == source.links
    assert source.rootfs is not None
    assert (out / "rootfs.ext4").read_bytes() == source.rootfs.read_bytes()
    for number, folder in enumerate(source.folders):
        for name in ("state", "memory", "disk.layer"):
            assert (out / str(number) / name).read_bytes() == (folder / name).read_bytes()
    assert {each.name for each in out.iterdir()} == {"rootfs.ext4", "0", "1", "2"}


def test_a_machine_without_a_disk_has_no_image(tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()

    head = read(Pieces(write(a_chain(tmp_path / "in", 2, disk=False))), out, ANYBODY)

    assert head.manifest.image is None
    assert {each.name for each in (out / "1").iterdir()} == {"state", "memory"}


def test_holes_come_out_as_holes(tmp_path: Path) -> None:
    source = a_chain(tmp_path / "in")
    assert source.rootfs is not None
    with source.rootfs.open("r+b") as file:
        file.truncate(1 << 20)
    (out := tmp_path / "out").mkdir()

    head = read(Pieces(write(source)), out, ANYBODY)

    assert head.manifest.image is not None
    assert head.manifest.image.data_bytes == 3 * BLOCK_BYTES
    written = (out / "rootfs.ext4").stat()
    assert (written.st_size, written.st_blocks * 512) == (1 << 20, 3 * BLOCK_BYTES)


def test_a_block_that_recurs_anywhere_in_the_chain_is_stored_once(tmp_path: Path) -> None:
    pack = a_pack(tmp_path / "in", 5)

    held = b"".join(contents(io.BytesIO(pack[head_bytes(pack) :])))

    assert held.count(block("same")) == 1
    assert held.count(bytes(BLOCK_BYTES)) == 0


def test_random_files_of_odd_lengths_come_out(tmp_path: Path) -> None:
    source = a_chain(tmp_path / "in")
    assert source.rootfs is not None
    source.rootfs.write_bytes(os.urandom(700_001) + bytes(100_000) + b"x")
    (out := tmp_path / "out").mkdir()

    read(Pieces(write(source)), out, ANYBODY)

    assert (out / "rootfs.ext4").read_bytes() == source.rootfs.read_bytes()


def test_the_longest_chain_that_there_may_be_is_packed(tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    pack = Pieces(write(a_chain(tmp_path / "in", limits.PACK_LINKS_MAX, disk=False)))

    assert len(read(pack, out, ANYBODY).manifest.links) == limits.PACK_LINKS_MAX


def test_blocks_beyond_what_a_packer_remembers_are_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkd.packs.blocks.DEDUP_BLOCKS_MAX", 1)
    source = a_chain(tmp_path / "in", 2)
    (out := tmp_path / "out").mkdir()
    pack = b"".join(write(source))

    read(io.BytesIO(pack), out, ANYBODY)

    held = b"".join(contents(io.BytesIO(pack[head_bytes(pack) :])))
    assert held.count(block("same")) > 1
    assert (out / "1" / "memory").read_bytes() == (source.folders[1] / "memory").read_bytes()


def test_a_signed_pack_says_by_whom(tmp_path: Path) -> None:
    pack = a_pack(tmp_path / "in")

    assert read_head(io.BytesIO(pack)).key is None
    assert read_head(io.BytesIO(signed(pack))).key == PUBLIC


def test_a_file_that_changed_in_the_store_is_not_packed(tmp_path: Path) -> None:
    source = a_chain(tmp_path / "in", 2)
    path = source.folders[1] / "memory"
    path.write_bytes(path.read_bytes()[:-1] + b"!")

    with pytest.raises(StoreError, match="memory of t1 is damaged"):
        b"".join(write(source))


def test_a_file_that_is_missing_is_an_error_before_the_first_byte(tmp_path: Path) -> None:
    source = a_chain(tmp_path / "in", 2)
    (source.folders[0] / "state").unlink()

    with pytest.raises(StoreError, match="cannot pack t0/state"):
        next(write(source))


def test_removing_what_is_being_packed_does_no_harm(tmp_path: Path) -> None:
    source = a_chain(tmp_path / "in")
    (out := tmp_path / "out").mkdir()
    pieces = write(source)
    first = next(pieces)
    for folder in source.folders:
        for each in folder.iterdir():
            each.unlink()

    head = read(Pieces([first, *pieces]), out, ANYBODY)

    assert head.manifest.head.tag == "t0"


def test_a_source_whose_files_are_elsewhere_is_read_there(tmp_path: Path) -> None:
    source = a_chain(tmp_path / "in")
    moved = source.folders[0].rename(tmp_path / "elsewhere")

    assert b"".join(write(replace(source, folders=(moved,))))


def test_the_digest_of_an_image_is_that_of_its_pieces_however_they_come() -> None:
    piece = 1 << 20
    data = bytes(3 * piece) + b"x" * 5 + bytes(piece) + os.urandom(piece) + bytes(7)
    pieces = (data[at : at + piece] for at in range(0, len(data), piece))
    expected = blake3(b"".join(blake3(each).digest() for each in pieces)).digest()

    plain, sparse = ImageDigest(), ImageDigest()
    plain.update(data)
    sparse.zeros(3 * piece)
    sparse.update(b"x" * 5)
    sparse.zeros(piece)
    sparse.update(data[4 * piece + 5 : -7])
    sparse.zeros(7)

    assert plain.digest() == sparse.digest() == expected


def test_runs_of_the_same_kind_are_one_record() -> None:
    records: list[bytes] = []
    encoder = Encoder(records.append)
    encoder.blocks(bytes(10 * BLOCK_BYTES))
    encoder.raw(b"")
    encoder.blocks(bytes(10 * BLOCK_BYTES))
    encoder.flush()

    assert [each[0] for each in records] == [Kind.ZEROS]


def test_a_block_is_found_where_it_was_written() -> None:
    places = Places()
    places.add(7, 0, 2)
    places.add(7, 2 * BLOCK_BYTES, 1)
    places.add(8, 100, 5)

    assert places.find(0, 9) == (7, 0, 3)
    assert places.find(2, 1) == (7, 2 * BLOCK_BYTES, 1)
    assert places.find(4, 9) == (8, 100 + BLOCK_BYTES, 4)
