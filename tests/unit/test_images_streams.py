"""What is packed is unpacked in bounded pieces, or refused, and its digests are known."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import random

import pytest
import zstandard

from forkd.images import streams
from forkd.images.streams import Checked, Damaged, Part, Stream, unpacked

NOISE = random.Random(1).randbytes(3 << 20)  # noqa: S311 - what does not compress
SKIPPED = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"


def checked(data: bytes) -> Checked:
    return Checked(Part(io.BytesIO(data), 0, len(data)))


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize(
    ("packed", "plain"),
    [
        (NOISE, NOISE),
        (b"", b""),
        (gzip.compress(NOISE), NOISE),
        (gzip.compress(b""), b""),
        (gzip.compress(b"a") + gzip.compress(NOISE) + gzip.compress(b"b"), b"a" + NOISE + b"b"),
        (gzip.compress(b"a") + bytes(700_000), b"a"),
        (gzip.compress(b"a") + bytes(700_000) + gzip.compress(b"b"), b"ab"),
        (gzip.compress(bytes(20 << 20)), bytes(20 << 20)),
        (zstd(NOISE), NOISE),
        (zstd(b"a") + zstd(b"") + zstd(b"b"), b"ab"),
        (SKIPPED + zstd(b"a") + SKIPPED + zstd(b"b") + SKIPPED, b"ab"),
        (zstd(bytes(20 << 20)), bytes(20 << 20)),
    ],
    ids=range(12),
)
def test_what_is_packed_is_unpacked_whole(packed: bytes, plain: bytes) -> None:
    source = checked(packed)
    pieces = list(unpacked(source))

    assert b"".join(pieces) == plain
    assert max(map(len, pieces), default=0) <= 1 << 20
    assert source.finish() == (f"sha256:{hashlib.sha256(packed).hexdigest()}", len(packed))


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (gzip.compress(NOISE)[:-1], "cut short"),
        (gzip.compress(NOISE)[:1000], "cut short"),
        (gzip.compress(b"a") + b"garbage", "damaged"),
        (gzip.compress(b"a")[:-5] + b"?" + gzip.compress(b"a")[-4:], "damaged"),
        (zstd(b"a")[:4] + b"\xff" * 50, "damaged"),
        (bz2.compress(b"a"), "packed with bzip2"),
        (lzma.compress(b"a"), "packed with xz"),
    ],
)
def test_what_is_damaged_or_packed_in_another_way_is_refused(packed: bytes, said: str) -> None:
    with pytest.raises(Damaged, match=said):
        list(unpacked(checked(packed)))


def test_the_window_of_zstd_is_bounded() -> None:
    most = streams.ZSTD_WINDOW_BYTES_MAX.bit_length() - 1

    def packed(window_log: int) -> bytes:
        parameters = zstandard.ZstdCompressionParameters(
            window_log=window_log, hash_log=6, chain_log=6
        )
        made = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        return made.compress(b"a" * 100) + made.flush()  # its size is not known before

    assert b"".join(unpacked(checked(packed(most)))) == b"a" * 100
    with pytest.raises(Damaged, match="too much memory"):
        list(unpacked(checked(packed(most + 1))))


def test_a_part_of_a_file_ends_where_it_should() -> None:
    part = Part(io.BytesIO(b"0123456789"), 2, 5)

    assert (part.exactly(2), part.position) == (b"23", 2)
    part.skip(1)
    assert list(part.pieces(10)) == [b"56"]
    assert (part.exactly(1), part.position) == (b"", 5)


def test_a_stream_is_read_over_the_borders_of_its_pieces() -> None:
    stream = Stream(iter([b"012", b"3456", b"789"]))

    assert (stream.exactly(2), stream.exactly(3), stream.position) == (b"01", b"234", 5)
    stream.skip(3)
    assert list(stream.pieces(10)) == [b"89"]
    assert (stream.exactly(1), stream.position) == (b"", 10)
    assert stream.digest == f"sha256:{hashlib.sha256(b'0123456789').hexdigest()}"
