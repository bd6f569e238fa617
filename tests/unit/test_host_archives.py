"""An archive from elsewhere is unpacked where it belongs, or not at all."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import pytest

from forkd.errors import InvalidRequest
from forkd.host.archives import ArchiveLimits, headers, judge, unpack
from tests.support.archives import HOSTILE, LONG, archive, entry, folder, hard, of_tarfile, symbolic

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = ArchiveLimits(entries_max=10_000, path_bytes_max=255)


def unpacked(tmp_path: Path, data: bytes) -> Path:
    (tmp_path / "archive").write_bytes(data)
    target = tmp_path / "outer" / "target"
    target.mkdir(parents=True)
    unpack(tmp_path / "archive", target, LIMITS)
    return target


def test_files_folders_and_links_inside_are_unpacked(tmp_path: Path) -> None:
    made = unpacked(
        tmp_path,
        archive(
            folder("./"),
            entry("./run.sh", b"#!/bin/sh\n", mode=0o755),
            symbolic("deep/link", "../run.sh"),
            entry("deep/er/file", b"x" * 1_000),
            hard("again", "deep/er/file"),
            folder("empty"),
        ),
    )

    assert (made / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (made / "deep/link").read_bytes() == b"#!/bin/sh\n"
    assert (made / "again").read_bytes() == b"x" * 1_000
    assert (made / "empty").is_dir()


def test_what_tar_writes_is_read(tmp_path: Path) -> None:
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        assert len(list(headers(io.BytesIO(of_tarfile(["a", "b/c"], form))))) == 2
    assert (unpacked(tmp_path, of_tarfile([LONG], tarfile.USTAR_FORMAT)) / LONG).is_file()


@pytest.mark.usefixtures("_filter")
def test_nothing_is_set_user_id_or_written_to_by_others(tmp_path: Path) -> None:
    made = unpacked(tmp_path, archive(entry("x", mode=0o7777), entry("y", mode=0o6066)))

    assert (made / "x").stat().st_mode & 0o7777 == 0o755
    assert (made / "y").stat().st_mode & 0o7777 == 0o644


@pytest.fixture(params=["filtered", "unfiltered"])
def _filter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the standard library's data filter, and without, as in Debian 12."""
    if request.param == "unfiltered":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


@pytest.mark.usefixtures("_filter")
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_archive_is_refused_and_writes_nothing_outside(tmp_path: Path, name: str) -> None:
    data, words = HOSTILE[name]

    with pytest.raises(InvalidRequest, match=words) as caught:
        unpacked(tmp_path, data)

    assert caught.value.context["field"] == "body"
    assert str(tmp_path) not in str(caught.value)
    assert {each.name for each in tmp_path.iterdir()} == {"archive", "outer"}
    assert [each.name for each in (tmp_path / "outer").iterdir()] == ["target"]


def test_a_time_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.mtime = 1 << 80

    with pytest.raises(InvalidRequest, match="cannot be unpacked"):
        unpacked(tmp_path, archive(header.tobuf(tarfile.GNU_FORMAT)))


def test_as_many_entries_as_may_be_are_taken_and_one_more_is_not() -> None:
    entries = [tarfile.TarInfo(f"d/{number}") for number in range(LIMITS.entries_max)]
    judge(entries, LIMITS)

    with pytest.raises(InvalidRequest, match="more than 10000 entries"):
        judge([*entries, tarfile.TarInfo("x")], LIMITS)


def test_a_path_of_the_greatest_length_is_taken_and_a_longer_one_is_not() -> None:
    assert len(LONG) == LIMITS.path_bytes_max
    judge([tarfile.TarInfo(LONG)], LIMITS)

    with pytest.raises(InvalidRequest, match="longer than 255 bytes"):
        judge([tarfile.TarInfo(f"{LONG}b")], LIMITS)
