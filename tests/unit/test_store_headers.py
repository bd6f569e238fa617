"""A stored file is ours and whole, or the error says which of five things is wrong."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from blake3 import blake3

from forkd.errors import StoreError
from forkd.store.headers import HEADER_BYTES, Magic, read_header

if TYPE_CHECKING:
    from pathlib import Path

BODY = b"the body"


def stored(
    *, magic: bytes = b"FKDSTATE", version: int = 2, reserved: int = 0, body: bytes = BODY
) -> bytes:
    head = struct.pack("<8sIIQ32s", magic, version, reserved, len(body), blake3(body).digest())
    return head + blake3(head).digest()[:8] + body


def reason(path: Path) -> object:
    with pytest.raises(StoreError) as refusal:
        read_header(path, Magic.STATE)
    return refusal.value.context["reason"]


def test_a_whole_file_gives_its_length_and_digest(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(stored())

    header = read_header(path, Magic.STATE)

    assert (header.body_bytes, header.digest) == (len(BODY), blake3(BODY).hexdigest())


def test_an_empty_body_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(stored(body=b""))

    assert read_header(path, Magic.STATE).body_bytes == 0


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    assert reason(tmp_path / "state") == "missing"


@pytest.mark.parametrize("raw", [b"", b"#!/bin/sh", stored(magic=b"FKDMEMRY")])
def test_another_file_is_not_ours(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(raw)

    assert reason(path) == "not_ours"


def test_a_later_version_is_too_new(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(stored(version=3))

    assert reason(path) == "too_new"


def test_a_version_that_is_no_longer_read_is_too_old(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(stored(version=1))

    with pytest.raises(StoreError, match="state is too old: it has version 1, and we read 2; bake"):
        read_header(path, Magic.STATE)
    assert reason(path) == "too_old"


@pytest.mark.parametrize("length", [8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1])
def test_a_truncated_file_is_damaged(tmp_path: Path, length: int) -> None:
    path = tmp_path / "state"
    path.write_bytes(stored()[:length])

    assert reason(path) == "damaged"


@pytest.mark.parametrize("bit", range(8 * 8, 8 * HEADER_BYTES, 37))
def test_a_flipped_bit_in_the_header_is_damage(tmp_path: Path, bit: int) -> None:
    raw = bytearray(stored())
    raw[bit // 8] ^= 1 << bit % 8
    path = tmp_path / "state"
    path.write_bytes(raw)

    assert reason(path) == "damaged"


@pytest.mark.parametrize("raw", [stored(version=0), stored(reserved=1), stored() + b"more"])
def test_impossible_values_are_damage(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(raw)

    assert reason(path) == "damaged"
