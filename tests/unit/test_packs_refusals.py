"""Whatever a pack says or holds, nothing is written but the files that it may declare."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import CapacityError, PackError
from forkd.packs import limits
from forkd.packs.blocks import Kind
from forkd.packs.manifest import BLOCK_BYTES, STORED_MAGIC
from forkd.packs.reader import Terms, read
from tests.support.packs import (
    ANYBODY,
    PUBLIC,
    a_pack,
    block,
    chunk,
    forged,
    framed,
    head_bytes,
    record,
    signed,
    with_records,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def pack(tmp_path: Path) -> bytes:
    return a_pack(tmp_path / "in", 2)


def refuse(pack: bytes, folder: Path, terms: Terms = ANYBODY) -> PackError:
    """Return why `pack` is refused; nothing but files of the chain may have been written."""
    (out := folder / "staging" / "out").mkdir(parents=True)
    before = _tree(folder)
    with pytest.raises(PackError) as refused:
        read(io.BytesIO(pack), out, terms)
    allowed = {"rootfs.ext4", "0", "1", "state", "memory", "disk.layer"}
    for path in _tree(folder) - before:
        assert path.startswith("staging/out/")
        assert set(path.removeprefix("staging/out/").split("/")) <= allowed
        assert not (folder / path).is_symlink()
    return refused.value


def signed_by(*keys: bytes) -> Terms:
    return Terms(trusted=keys, allow_unsigned=False, room_bytes=1 << 30)


def _tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# Who signed it


def test_a_pack_that_nobody_signed_is_refused(pack: bytes, tmp_path: Path) -> None:
    error = refuse(pack, tmp_path, replace(ANYBODY, allow_unsigned=False))

    assert error.context["reason"] == "unsigned"
    assert "--allow-unsigned" in str(error)
    assert not any((tmp_path / "staging/out").iterdir())


def test_a_pack_signed_by_a_stranger_is_refused_and_names_the_key(
    pack: bytes, tmp_path: Path
) -> None:
    error = refuse(signed(pack), tmp_path, signed_by(bytes(32)))

    assert error.context["reason"] == "untrusted"
    assert "forkd-ed25519 " in str(error)


def test_a_pack_signed_by_someone_trusted_is_taken(pack: bytes, tmp_path: Path) -> None:
    head = read(io.BytesIO(signed(pack)), tmp_path, signed_by(bytes(32), PUBLIC))

    assert head.key == PUBLIC


def test_a_changed_manifest_does_not_match_its_signature_whoever_is_allowed(
    pack: bytes, tmp_path: Path
) -> None:
    whole = signed(pack)
    at = whole.index(b'"vcpus":2')

    error = refuse(whole[: at + 8] + b"3" + whole[at + 9 :], tmp_path)

    assert error.context["reason"] == "signature"


def test_a_changed_signature_is_refused_whoever_is_allowed(pack: bytes, tmp_path: Path) -> None:
    whole = bytearray(signed(pack))
    whole[head_bytes(pack) - 1] ^= 1

    assert refuse(bytes(whole), tmp_path).context["reason"] == "signature"


def test_the_files_are_signed_through_their_digests(pack: bytes, tmp_path: Path) -> None:
    whole = signed(pack)
    other = with_records(whole, [record(Kind.ZEROS, 66), record(Kind.BYTES, 4, 0, b"tail")])

    error = refuse(other, tmp_path, signed_by(PUBLIC))

    assert error.context["reason"] == "digest"


# What the manifest says


def link(**members: object) -> Callable[[dict[str, Any]], object]:
    return lambda said: said["links"][1].update(members)


def file(**members: object) -> Callable[[dict[str, Any]], object]:
    return lambda said: said["links"][1]["files"][0].update(members)


def image(**members: object) -> Callable[[dict[str, Any]], object]:
    return lambda said: said["image"].update(members)


REFUSED: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("manifest", file(name="/etc/passwd")),
    ("manifest", file(name="../../etc/passwd")),
    ("manifest", file(name="state/../../x")),
    ("manifest", file(name="manifest.json")),
    ("manifest", file(name="disk.top")),
    ("manifest", file(type="symlink")),
    ("manifest", file(target="/etc/passwd")),
    ("manifest", file(mode=0o4755)),
    ("manifest", file(device=[1, 3])),
    ("manifest", file(bytes=63)),
    ("manifest", file(bytes=-1)),
    ("manifest", file(bytes=2.5)),
    ("manifest", file(bytes="12")),
    ("manifest", file(bytes=limits.PACK_BYTES_MAX + 1)),
    ("manifest", file(digest="0" * 63)),
    ("manifest", lambda said: said["links"][1]["files"].pop()),
    ("manifest", lambda said: said["links"][1]["files"].append(said["links"][1]["files"][0])),
    ("manifest", lambda said: said.update(extra=[])),
    ("manifest", lambda said: said.update(version=0)),
    ("manifest", lambda said: said.update(version="1")),
    ("too_new", lambda said: said.update(version=2)),
    ("manifest", lambda said: said.update(links=[])),
    ("manifest", lambda said: said.update(links=said["links"] * 33)),
    ("manifest", lambda said: said.pop("image")),
    ("manifest", lambda said: said.update(image=None)),
    ("manifest", link(tag="/root")),
    ("manifest", link(tag="..")),
    ("manifest", link(tag="a..b")),
    ("manifest", link(tag="t1\n")),
    ("manifest", link(tag="t" * 65)),
    ("manifest", link(parent="../t0")),
    ("manifest", link(image_key="/var/lib/images")),
    ("manifest", link(image_key="../other")),
    ("manifest", link(kernel="/boot/vmlinuz")),
    ("manifest", link(kernel="k" * (limits.NAME_CHARS_MAX + 1))),
    ("manifest", link(recipe="/home/user/recipe")),
    ("manifest", link(runtime="../../bin/sh")),
    ("manifest", link(rootfs="/dev/sda")),
    ("manifest", link(directory="/etc")),
    ("manifest", link(devices=["/dev/kvm"])),
    ("manifest", link(vcpus=0)),
    ("manifest", link(vcpus=1025)),
    ("manifest", link(memory_bytes=0)),
    ("manifest", link(cpu={"model": "\x1b[2J", "features": []})),
    ("manifest", link(cpu={"model": "x", "features": ["a"] * (limits.FEATURES_MAX + 1)})),
    ("manifest", link(cpu={"model": "x", "features": ["/a"]})),
    ("manifest", link(created_at="yesterday")),
    ("chain", link(parent=None)),
    ("chain", link(parent="t1")),
    ("chain", link(parent="other")),
    ("chain", link(tag="t0")),
    ("chain", link(memory_bytes=1 << 21)),
    ("chain", link(disk_bytes=1 << 21)),
    ("chain", link(vcpus=1)),
    ("chain", link(image_key="other")),
    ("chain", lambda said: said["links"].reverse()),
    ("chain", lambda said: said["links"].pop(0)),
    ("manifest", image(bytes=(1 << 20) + 1)),
    ("manifest", image(data_bytes=1 << 20)),
    ("manifest", image(path="/etc/shadow")),
]


@pytest.mark.parametrize(("reason", "change"), REFUSED)
def test_a_manifest_that_says_what_it_must_not_is_refused(
    reason: str, change: Callable[[dict[str, Any]], object], pack: bytes, tmp_path: Path
) -> None:
    error = refuse(forged(pack, change), tmp_path)

    assert error.context["reason"] == reason
    assert not any((tmp_path / "staging/out").iterdir())


def test_a_manifest_that_is_changed_in_nothing_is_taken(pack: bytes, tmp_path: Path) -> None:
    assert read(io.BytesIO(forged(pack, lambda _: None)), tmp_path, ANYBODY)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"version": 1}']
)
def test_a_manifest_that_is_none_is_refused(raw: bytes, tmp_path: Path) -> None:
    assert refuse(framed(raw), tmp_path).context["reason"] == "manifest"


def test_more_bytes_than_a_pack_may_have_in_all_are_refused(pack: bytes, tmp_path: Path) -> None:
    def grow(said: dict[str, Any]) -> None:
        for each in said["links"][0]["files"]:
            each["bytes"] = limits.PACK_BYTES_MAX // 2

    assert refuse(forged(pack, grow), tmp_path).context["reason"] == "limit"


def test_a_pack_that_the_disk_has_no_room_for_is_refused_before_it_is_written(
    pack: bytes, tmp_path: Path
) -> None:
    (out := tmp_path / "out").mkdir()

    with pytest.raises(CapacityError, match="needs"):
        read(io.BytesIO(pack), out, replace(ANYBODY, room_bytes=BLOCK_BYTES))

    assert not any(out.iterdir())


# How it is framed


def test_what_is_no_pack_is_said_to_be_none(tmp_path: Path) -> None:
    assert refuse(b"PK\x03\x04" + bytes(200), tmp_path).context["reason"] == "not_ours"


def test_a_later_version_is_too_new(pack: bytes, tmp_path: Path) -> None:
    later = pack[:8] + struct.pack("<I", 2) + pack[12:]

    assert refuse(later, tmp_path).context["reason"] == "too_new"


def test_a_version_that_there_never_was_is_no_pack(pack: bytes, tmp_path: Path) -> None:
    changed = pack[:8] + struct.pack("<I", 0) + pack[12:]

    assert refuse(changed, tmp_path).context["reason"] == "not_ours"


def test_a_manifest_one_byte_too_long_is_refused_before_it_is_read(tmp_path: Path) -> None:
    length = limits.PACK_MANIFEST_BYTES_MAX
    head = framed(b"")[:12]

    at_limit = refuse(head + struct.pack("<I", length), tmp_path / "a")
    beyond = refuse(head + struct.pack("<I", length + 1), tmp_path / "b")

    assert (at_limit.context["reason"], beyond.context["reason"]) == ("truncated", "limit")


def test_a_pack_cut_short_anywhere_is_refused(pack: bytes, tmp_path: Path) -> None:
    cuts = {0, 7, 15, 16, 40, head_bytes(pack) - 1, *range(head_bytes(pack), len(pack), 31)}
    cuts |= {len(pack) - 8, len(pack) - 1}

    reasons = {refuse(pack[:cut], tmp_path / str(cut)).context["reason"] for cut in cuts}

    assert reasons == {"truncated"}


def test_a_pack_that_goes_on_behind_its_end_is_refused(pack: bytes, tmp_path: Path) -> None:
    assert refuse(pack + b"x", tmp_path).context["reason"] == "trailing"


def test_a_file_that_was_not_declared_is_refused(pack: bytes, tmp_path: Path) -> None:
    more = pack[:-8] + chunk(record(Kind.BYTES, 4, 0, b"more")) + bytes(8)

    assert refuse(more, tmp_path).context["reason"] == "undeclared"


def test_a_flipped_bit_behind_the_manifest_is_refused_or_changes_no_file(
    pack: bytes, tmp_path: Path
) -> None:
    """Compressed data has a few bits that mean nothing."""
    files = ("rootfs.ext4", *(f"{n}/{name}" for n in (0, 1) for name in STORED_MAGIC))
    (good := tmp_path / "good").mkdir()
    read(io.BytesIO(pack), good, ANYBODY)
    for at in range(head_bytes(pack), len(pack), 17):
        flipped = bytearray(pack)
        flipped[at] ^= 1 << at % 8
        (out := tmp_path / str(at)).mkdir()
        with contextlib.suppress(PackError):
            read(io.BytesIO(flipped), out, ANYBODY)
            assert all((out / name).read_bytes() == (good / name).read_bytes() for name in files)


@pytest.mark.parametrize(
    "bad",
    [
        struct.pack("<II", limits.CHUNK_STORED_BYTES_MAX + 1, 1),
        struct.pack("<II", 1, limits.CHUNK_BYTES_MAX + 1),
        struct.pack("<II", 0, 1),
        struct.pack("<II", 4, 4) + b"junk",
        struct.pack("<II", 1, 0) + b"x",
        struct.pack("<II", len(chunk(b"ab")) - 8, 1) + chunk(b"ab")[8:],
        struct.pack("<II", len(chunk(b"ab")) - 7, 2) + chunk(b"ab")[8:] + b"x",
    ],
)
def test_a_chunk_that_is_not_what_it_says_is_damage(
    bad: bytes, pack: bytes, tmp_path: Path
) -> None:
    whole = pack[: head_bytes(pack)] + bad + bytes(8)

    assert refuse(whole, tmp_path).context["reason"] == "damaged"


def test_a_chunk_that_decompresses_to_gigabytes_is_refused_before_it_does(
    pack: bytes, tmp_path: Path
) -> None:
    bomb = bytearray(chunk(bytes(1 << 20))[8:])
    at = bytes(bomb).index(struct.pack("<I", 1 << 20))
    bomb[at : at + 4] = struct.pack("<I", 1 << 31)
    whole = pack[: head_bytes(pack)] + struct.pack("<II", len(bomb), 1 << 20) + bomb + bytes(8)

    assert refuse(whole, tmp_path).context["reason"] == "damaged"


# What it holds

RECORDS: list[tuple[str, list[bytes]]] = [
    ("truncated", [b"\x01"]),
    ("truncated", [record(Kind.BYTES, 10, 0, b"short")]),
    ("truncated", [record(Kind.BLOCKS, 1, 0, b"short")]),
    ("damaged", [record(0, 1)]),
    ("damaged", [record(5, 1)]),
    ("damaged", [record(Kind.ZEROS, 0)]),
    ("damaged", [record(Kind.BYTES, 0)]),
    ("damaged", [record(Kind.ZEROS, 1, 1)]),
    ("damaged", [record(Kind.COPY, 1, 0)]),
    ("damaged", [record(Kind.BLOCKS, 1, 0, block("a")), record(Kind.COPY, 2, 0)]),
    ("damaged", [record(Kind.BLOCKS, 1, 0, block("a")), record(Kind.COPY, 1, (1 << 64) - 1)]),
    ("length", [record(Kind.ZEROS, 67)]),
    ("length", [record(Kind.ZEROS, (1 << 64) - 1)]),
    ("length", [record(Kind.BYTES, (1 << 64) - 1)]),
    ("length", [record(Kind.BLOCKS, 1, 0, block("a")), record(Kind.COPY, 1, 0)] * 4),
    ("digest", [record(Kind.ZEROS, 66), record(Kind.BYTES, 4, 0, b"tail")]),
]


@pytest.mark.parametrize(("reason", "records"), RECORDS)
def test_records_that_do_not_make_the_declared_files_are_refused(
    reason: str, records: list[bytes], pack: bytes, tmp_path: Path
) -> None:
    assert refuse(with_records(pack, records), tmp_path).context["reason"] == reason


def test_a_file_that_grows_past_its_declared_data_is_refused(pack: bytes, tmp_path: Path) -> None:
    """The holes of an image may become data in a pack that lies about them."""
    copies = [record(Kind.BLOCKS, 1, 0, block("a")), record(Kind.COPY, 1, 0)]

    error = refuse(with_records(pack, [*copies, record(Kind.COPY, 1, 0)]), tmp_path)

    assert "more data than the pack declares" in str(error)


def test_a_folder_that_is_not_empty_is_not_written_into(pack: bytes, tmp_path: Path) -> None:
    """Somebody else's link under a name of ours is never followed."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (out := tmp_path / "out").mkdir()
    (out / "rootfs.ext4").symlink_to(victim)

    with pytest.raises(FileExistsError):
        read(io.BytesIO(pack), out, ANYBODY)

    assert victim.read_text() == "untouched"


def test_no_descriptor_stays_open_after_a_refusal(pack: bytes, tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))

    refuse(pack + b"x", tmp_path)

    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_error_shows_only_the_beginning_of_what_a_manifest_says(
    pack: bytes, tmp_path: Path
) -> None:
    error = refuse(forged(pack, lambda said: said.update({"\x1b[2J" * 100_000: 1})), tmp_path)

    assert len(json.dumps(str(error))) < 1000
    assert str(error).isprintable()
