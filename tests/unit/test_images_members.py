"""Archives are read as tar writes them; what is too long, damaged or unknown is refused."""

from __future__ import annotations

import io
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest

from forkd.images import members as reading
from forkd.images.members import Kind, Member, members
from forkd.images.streams import Damaged, Part
from tests.support.oci import folder, hardlink, regular, symlink

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.oci import Member as Written


def archive(*written: Written, kind: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as made:
        for info, data in written:
            made.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def read(data: bytes) -> list[tuple[Member, bytes]]:
    part = Part(io.BytesIO(data), 0, len(data))
    return [(each, b"".join(part.pieces(each.stored_bytes))) for each in members(part)]


def with_headers(headers: dict[str, str], data: bytes = b"") -> bytes:
    info, _ = regular("name", data)
    info.pax_headers = headers
    return archive((info, data))


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_each_kind_of_member_is_read_in_each_format(kind: int) -> None:
    device = tarfile.TarInfo("null")
    device.type, device.devmajor, device.devminor = tarfile.CHRTYPE, 1, 3
    fifo = tarfile.TarInfo("pipe")
    fifo.type = tarfile.FIFOTYPE
    file, _ = regular("dir/file", b"x" * 700, mode=0o4755, owner=1000)
    file.mtime = 1_234_567_890

    found = read(
        archive(
            folder("dir"), (file, b"x" * 700), symlink("link", "dir"), hardlink("hard", "dir/file"),
            (device, b""), (fifo, b""), regular("last", b"y"), kind=kind,
        )
    )  # fmt: skip

    assert [each.kind for each, _ in found] == [
        Kind.FOLDER, Kind.FILE, Kind.SYMLINK, Kind.HARDLINK, Kind.CHARACTER_DEVICE, Kind.FIFO,
        Kind.FILE,
    ]  # fmt: skip
    member, data = found[1]
    assert (member.name, data, member.size) == ("dir/file", b"x" * 700, 700)
    attributes = member.attributes
    assert (attributes.mode, attributes.uid, attributes.gid) == (0o4755, 1000, 1000)
    assert attributes.mtime_ns == 1_234_567_890 * 10**9
    assert (found[2][0].link, found[3][0].link, found[4][0].device) == ("dir", "dir/file", (1, 3))
    assert found[-1][1] == b"y"


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_large_numbers_are_read(kind: int) -> None:
    name, target = "d/" * 200 + "ä", "e/" * 150 + "f"
    info, _ = symlink(name, target)
    info.uid = info.gid = reading.ID_MAX

    ((member, _),) = read(archive((info, b""), kind=kind))

    assert (member.name, member.link) == (name, target)
    assert member.attributes.uid == reading.ID_MAX


def test_a_device_may_have_such_numbers() -> None:
    def device(major: int, minor: int) -> tuple[int, int]:
        info = tarfile.TarInfo("device")
        info.type, info.devmajor, info.devminor = tarfile.BLKTYPE, major, minor
        return read(archive((info, b""), kind=tarfile.GNU_FORMAT))[0][0].device

    largest = reading.DEVICE_MAJOR_MAX, reading.DEVICE_MINOR_MAX
    assert device(*largest) == largest
    for major, minor in ((largest[0] + 1, 0), (0, largest[1] + 1), (1 << 40, 0)):
        with pytest.raises(Damaged, match=f"'device' is .* the numbers {major} and {minor}"):
            device(major, minor)


def test_a_name_that_is_no_utf8_stays_as_it_is() -> None:
    info, _ = regular("a\udcff")

    ((member, _),) = read(archive((info, b""), kind=tarfile.GNU_FORMAT))

    assert member.name == "a\udcff"


def test_times_have_fractions_and_those_that_no_file_can_have_are_zero() -> None:
    def time_ns(text: str) -> int:
        return read(with_headers({"mtime": text}))[0][0].attributes.mtime_ns

    assert time_ns("1795940635.7073195230") == 1_795_940_635_707_319_523
    assert time_ns("-1.5") == -1_500_000_000
    assert time_ns(str(reading.SECONDS_MAX)) == reading.SECONDS_MAX * 10**9
    assert time_ns(str(reading.SECONDS_MAX + 1)) == time_ns("1" * 30) == 0


def test_attributes_of_users_and_capabilities_are_kept_and_others_left_out() -> None:
    headers = {
        "SCHILY.xattr.user.a": "1",
        "SCHILY.xattr.security.capability": "\x01\0\0\x02",
        "SCHILY.xattr.security.selinux": "x",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.acl.access": "user::rw-",
    }

    ((member, _),) = read(with_headers(headers))

    assert member.attributes.xattrs == (("user.a", b"1"), ("security.capability", b"\x01\0\0\x02"))


def test_a_global_header_is_left_out() -> None:
    block = tarfile.TarInfo("pax_global_header")
    block.type, block.size = tarfile.XGLTYPE, 512
    data = block.tobuf() + b"12 uid=4711\n".ljust(512, b"\0") + archive(regular("a", b"x"))

    ((member, content),) = read(data)

    assert (member.name, member.attributes.uid, content) == ("a", 0, b"x")


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_sparse_files_of_tar_are_read(tmp_path: Path, form: str) -> None:
    holes = tmp_path / "holes"
    with holes.open("wb") as file:
        for number in range(40):
            file.seek(number << 20)
            file.write(bytes([number + 1]) * 5_000)
        file.truncate(64 << 20)
    made = subprocess.run(  # noqa: S603 - our own arguments
        ["tar", "-S", f"--format={form}", "-C", tmp_path, "-cf", "-", "holes"],  # noqa: S607
        check=True, capture_output=True,
    ).stdout  # fmt: skip

    ((member, data),) = read(made)

    assert (member.name, member.size) == ("holes", 64 << 20)
    assert member.extents is not None
    plain = bytearray(member.size)
    at = 0
    for offset, length in member.extents:
        plain[offset : offset + length] = data[at : at + length]
        at += length
    assert bytes(plain) == holes.read_bytes()


SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}


@pytest.mark.parametrize(
    ("headers", "data", "said"),
    [
        ({"GNU.sparse.map": "0,1"}, b"", "another format"),
        (SPARSE, b"", "cut short"),
        (SPARSE, b"1\n0\n".ljust(512, b"1"), "makes no sense|cut short"),
        (SPARSE, b"1\n-1\n0\n".ljust(512, b"\0"), "makes no sense"),
        (SPARSE, b"1\n9\n1\n".ljust(512, b"\0") + b"x", "'name' makes no sense"),
        (SPARSE, b"1\n0\n2\n".ljust(512, b"\0") + b"x", "'name' makes no sense"),
        (SPARSE, b"2\n4\n1\n0\n1\n".ljust(512, b"\0") + b"xy", "'name' makes no sense"),
        (SPARSE, b"9999999\n" + b"0\n" * 252, "cut short"),
        ({**SPARSE, "GNU.sparse.realsize": "-1"}, b"0\n".ljust(512, b"\0"), "realsize"),
        ({"uid": "-1"}, b"", "uid is '-1'"),
        ({"gid": str(reading.ID_MAX + 1)}, b"", f"gid is {reading.ID_MAX + 1}"),
        ({"size": "1e9"}, b"", "size is"),
        ({"mtime": "soon"}, b"", "mtime is 'soon'"),
        ({"mtime": "nan"}, b"", "mtime is 'nan'"),
        ({"path": "a\0b"}, b"", "NUL"),
        ({"path": "a" * (reading.PATH_BYTES_MAX + 1)}, b"", "longer than 4096 bytes"),
        ({"SCHILY.xattr.user.a": "1" * reading.HEADER_BYTES_MAX}, b"", "bytes of headers"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(
    headers: dict[str, str], data: bytes, said: str
) -> None:
    with pytest.raises(Damaged, match=said):
        read(with_headers(headers, data))


def test_a_path_may_be_so_long() -> None:
    path = "a/" * (reading.PATH_BYTES_MAX // 2)

    assert read(with_headers({"path": path}))[0][0].name == path


def pax(data: bytes) -> bytes:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, len(data)
    return header.tobuf() + data.ljust(-(-len(data) // 512) * 512, b"\0")


@pytest.mark.parametrize(
    "record",
    [
        b"5 a=1", b"6 a=1", b"7 a=1\n", b"0 a=1\n", b"-6 a=1\n", b"a=1\n", b"5 a1\n",
        b"9" * 20 + b" a=1\n",
    ],
)  # fmt: skip
def test_a_record_of_another_length_is_refused(record: bytes) -> None:
    with pytest.raises(Damaged, match="pax header makes no sense"):
        read(pax(record) + archive(regular("a")))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"no archive at all" * 100, "no tar archive"),
        (archive(regular("a"))[:300], "cut short"),
        (pax(b"6 a=1\n"), "half a member"),
        (pax(b"6 a=1\n")[:515], "cut short"),
    ],
)
def test_an_archive_that_is_cut_or_none_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(Damaged, match=said):
        read(data)


def test_a_kind_that_nobody_knows_is_refused() -> None:
    info = tarfile.TarInfo("strange")
    info.type = b"V"

    with pytest.raises(Damaged, match="'strange' is of a kind that forkd does not know"):
        read(info.tobuf() + bytes(1024))


def test_the_map_of_a_sparse_file_may_be_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "EXTENTS_MAX", 21)
    lines = "".join(f"{each}\n0\n" for each in range(400))
    data = f"400\n{lines}".encode()
    data = data.ljust(-(-len(data) // 512) * 512, b"\0")

    with pytest.raises(Damaged, match="too long"):
        read(with_headers({**SPARSE, "GNU.sparse.realsize": "400"}, data))
