"""Trees as archives: what goes in comes out, and nothing hostile leaves its folder."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
from typing import TYPE_CHECKING

import pytest

from forkd.errors import EngineError
from forkd.sdk._archive import BLOCK, Copied, pack, unpack
from forkd.sdk._local import shown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ODD = os.fsdecode(b"caf\xe9 \n-")


def packed(source: Path, name: str | None = None) -> tuple[bytes, Copied]:
    copied = Copied()
    return b"".join(pack(source, copied, name=name, exact=False)), copied


def pieces(data: bytes) -> Iterator[bytes]:
    return (data[start : start + 1000] for start in range(0, len(data), 1000))


def unpacked(data: bytes, target: Path) -> Copied:
    copied = Copied()
    unpack(pieces(data), target, copied, exact=False)
    return copied


def made(*members: tarfile.TarInfo) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        root = tarfile.TarInfo("./")
        root.type = tarfile.DIRTYPE
        for member in (root, *members):
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return archive.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, 0o644
    return info


def test_a_tree_comes_out_as_it_went_in(tmp_path: Path) -> None:
    tree, back = tmp_path / "tree", tmp_path / "back"
    deep = tree.joinpath(*["x"] * 300)
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"deep")
    (tree / ODD).write_bytes(b"odd")
    (tree / ("n" * 200)).write_bytes(b"long")
    (tree / "empty").touch(mode=0o640)
    os.utime(tree / "empty", (1, 1_500_000_000))
    (tree / "link").symlink_to("t" * 200)
    (tree / "absolute").symlink_to("/no/where")
    (tree / "shut").mkdir(mode=0o500)
    (tree / "su").touch()
    (tree / "su").chmod(0o4755)
    os.mkfifo(tree / "pipe")
    with (tree / "sparse").open("wb") as sparse:
        sparse.seek(1 << 30)
        sparse.write(b"middle")
        sparse.truncate(3 << 30)

    data, went = packed(tree)
    came = unpacked(data, back)

    assert len(data) < 1 << 20
    assert went.skipped == [f"{tree}/pipe: a device, a pipe or a socket"]
    assert (came.skipped, came.files, came.bytes) == ([], went.files, went.bytes)
    assert back.joinpath(*["x"] * 300, "file").read_bytes() == b"deep"
    assert (back / ODD).read_bytes() == b"odd"
    assert (back / ("n" * 200)).read_bytes() == b"long"
    found = (back / "empty").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_mtime) == (0o640, 1_500_000_000)
    assert str((back / "link").readlink()) == "t" * 200
    assert str((back / "absolute").readlink()) == "/no/where"
    assert stat.S_IMODE((back / "shut").stat().st_mode) == 0o500
    assert stat.S_IMODE((back / "su").stat().st_mode) == 0o755
    sparse_back = (back / "sparse").stat()
    assert sparse_back.st_size == 3 << 30
    assert sparse_back.st_blocks < 1 << 12
    with (back / "sparse").open("rb") as file:
        file.seek(1 << 30)
        assert file.read(6) == b"middle"

    assert unpacked(data, back).skipped == [], "also over what is there"


def test_what_we_send_is_what_tar_reads(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / ODD).write_bytes(b"odd")
    with (tmp_path / "tree" / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 24)

    data, _ = packed(tmp_path / "tree")

    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [each.name for each in tar] == [".", ODD, "sparse"]
        contents = tar.extractfile("sparse")
        assert contents is not None
        assert contents.read() == bytes(1 << 24)


def test_one_file_gets_the_name_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)

    data, _ = packed(tmp_path / "a", "name")
    copied = unpacked(data, tmp_path / "b")

    assert (copied.files, copied.bytes) == (1, 1000)
    assert (tmp_path / "b").read_bytes() == b"x" * 1000


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        ([member("../evil")], "../evil"),
        ([member("a/../../evil")], "a/../../evil"),
        ([member("link", tarfile.SYMTYPE, ".."), member("link/evil")], "link/evil"),
        ([member("link", tarfile.SYMTYPE, "/tmp"), member("link/evil")], "link/evil"),
        ([member("evil", tarfile.CHRTYPE)], "evil"),
        ([member("evil", tarfile.LNKTYPE, "/etc/passwd")], "evil"),
        ([member("folder/", tarfile.DIRTYPE), member("folder")], "folder"),
    ],
)
def test_what_is_bad_is_left_out_and_the_rest_is_made(
    tmp_path: Path, bad: list[tarfile.TarInfo], path: str
) -> None:
    data = made(*bad, member("good"))

    copied = unpacked(data, tmp_path / "target")

    assert [each.partition(": ")[0] for each in copied.skipped] == [path]
    assert (tmp_path / "target" / "good").exists()
    assert [each.name for each in tmp_path.iterdir()] == ["target"]


def test_an_absolute_name_is_made_below_the_folder(tmp_path: Path) -> None:
    unpacked(made(member("/etc/name")), tmp_path / "target")

    assert (tmp_path / "target" / "etc" / "name").exists()


@pytest.mark.parametrize("length", [0, 100, 1200, 2000])
def test_an_archive_that_ends_early_is_an_error(tmp_path: Path, length: int) -> None:
    long = member("long")
    long.size = 5000

    with pytest.raises(EngineError):
        unpacked(made(long)[:length], tmp_path / "target")

    assert not list(tmp_path.glob("target/*"))


def test_what_is_no_archive_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no valid archive"):
        unpacked(b"x" * 10_000, tmp_path / "target")


def test_an_extended_header_past_its_limit_is_an_error(tmp_path: Path) -> None:
    long = member("long")
    long.pax_headers = {"comment": "x" * 70_000}

    with pytest.raises(EngineError, match="no valid archive: an extended header is too long"):
        unpacked(made(long), tmp_path / "target")


@pytest.mark.parametrize(
    "records",
    [
        {"size": "-1"},
        {"size": "9" * 20},
        {"uid": str((1 << 32) - 1)},
        {"gid": "9" * 20},
        {"GNU.sparse.realsize": str(1 << 63)},
    ],
)
def test_a_number_past_its_limit_is_an_error(tmp_path: Path, records: dict[str, str]) -> None:
    bad = member("bad")
    bad.pax_headers = records

    with pytest.raises(EngineError, match="no valid archive: a number is malformed"):
        unpacked(made(bad), tmp_path / "target")


@pytest.mark.parametrize("digits", [b"-0000000001", b"+0000000001", b"0_000000001"])
def test_a_size_is_digits_only(tmp_path: Path, digits: bytes) -> None:
    data = bytearray(made(member("bad")))
    header = slice(BLOCK, 2 * BLOCK)
    data[BLOCK + 124 : BLOCK + 135] = digits
    data[BLOCK + 148 : BLOCK + 156] = b" " * 8
    data[BLOCK + 148 : BLOCK + 155] = b"%06o\0" % sum(data[header])

    with pytest.raises(EngineError, match="no valid archive: a number is malformed"):
        unpacked(bytes(data), tmp_path / "target")


@pytest.mark.parametrize(
    "record", [b"7 size\n", b"-5 size=1\n", b"+9 size=1\n", b"99 size=1\n", b"size=1\n", b"0 =\n"]
)
def test_a_malformed_record_is_an_error(tmp_path: Path, record: bytes) -> None:
    bad = member("x", tarfile.XHDTYPE)
    bad.size = len(record)
    root = member("./", tarfile.DIRTYPE).tobuf(tarfile.PAX_FORMAT)
    data = root + bad.tobuf(tarfile.PAX_FORMAT) + record + bytes(-len(record) % BLOCK + 2 * BLOCK)

    with pytest.raises(EngineError, match="no valid archive"):
        unpacked(data, tmp_path / "target")


@pytest.mark.parametrize(
    "chart", [b"20000\n", b"2\n" + b"0" * 2000, b"1\n0\n1099511627776\n", b"x\n", b"1" * 600]
)
def test_a_map_of_holes_has_limits(tmp_path: Path, chart: bytes) -> None:
    bad = member("bad")
    bad.pax_headers = {"GNU.sparse.realsize": "9", "size": str(1 << 40)}
    root = member("./", tarfile.DIRTYPE).tobuf(tarfile.PAX_FORMAT)
    chart += bytes(-len(chart) % BLOCK)

    def endless() -> Iterator[bytes]:
        yield root + bad.tobuf(tarfile.PAX_FORMAT) + chart
        for _ in range(1000):
            yield b"0" * BLOCK
        raise AssertionError("read on")

    with pytest.raises(EngineError, match="map of holes is wrong"):
        unpack(endless(), tmp_path / "target", Copied(), exact=False)

    assert not list(tmp_path.glob("target/*"))


def test_a_file_that_becomes_shorter_is_padded_and_named_once(tmp_path: Path) -> None:
    source = tmp_path / "file"
    source.write_bytes(b"x" * 1_000_000)
    copied = Copied()
    packing = pack(source, copied, name="file", exact=False)

    header = next(packing)
    os.truncate(source, 10)
    data = header + b"".join(packing)

    assert copied.skipped == [f"{source}: not read to its end: it became shorter"]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        contents = tar.extractfile("file")
        assert contents is not None
        assert contents.read() == b"x" * 10 + bytes(999_990)


def test_what_the_sandbox_left_out_is_named_and_harmless_to_print(tmp_path: Path) -> None:
    last = member("./", tarfile.DIRTYPE)
    skipped = {"skipped": [{"path": "a\x1b[31m", "reason": "no"}], "more_skipped": 2}
    last.pax_headers = {"FORKD.skipped": json.dumps(skipped)}

    copied = unpacked(made(last), tmp_path / "target")

    assert copied.skipped == ["a\\x1b[31m: no", "2 more"]
    last.pax_headers = {"FORKD.skipped": "[]"}
    with pytest.raises(EngineError):
        unpacked(made(last), tmp_path / "target")


def test_a_name_is_shown_whatever_is_in_it() -> None:
    assert shown(ODD) == "caf\\udce9 \\n-"
