"""The disk of the Intel machine: its boot sectors, and which files are on it."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from forkd.errors import HostError
from tests.intel import disk

GIB = 1 << 30


def test_the_table_in_the_first_sector_has_the_partition_behind_the_boot_loader() -> None:
    code = bytes(range(256)) * 8
    sectors = disk.with_partition(code, 2 * GIB)

    active, _, kind, _, start, count = struct.unpack_from("<B3sB3sII", sectors, 446)
    assert (active, kind, start, count) == (0x80, 0x83, 2048, 2 * GIB // 512)
    assert sectors[510:512] == b"\x55\xaa"
    assert sectors[:446] == code[:446]
    assert sectors[512:] == code[512:]


def test_a_boot_loader_that_reaches_into_the_partition_is_refused(tmp_path: Path) -> None:
    boot = bytes(disk.PARTITION_BYTES_BEFORE + 1)

    with pytest.raises(HostError, match="1048577 bytes"):
        disk.make_image(tmp_path / "disk.img", tmp_path, boot, run=lambda _: None)


def test_files_keep_path_time_and_mode_and_some_folders_are_left_out(tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    for name in ("kept", "target", "kept/build"):
        (source / name).mkdir(parents=True)
        (source / name / "file").write_text(name)
    (source / "kept/file").chmod(0o750)
    os.utime(source / "kept/file", (1, 1_000_000_000))
    (source / "link").symlink_to("nowhere")

    disk.place(root, source, leave=("target", "build"))

    placed = root / source.relative_to("/")
    assert {path.relative_to(placed).as_posix() for path in placed.rglob("*")} == {
        "kept",
        "kept/file",
        "link",
    }
    found = (placed / "kept/file").stat()
    assert (found.st_mtime, found.st_mode & 0o777) == (1_000_000_000, 0o750)
    assert (placed / "link").readlink() == Path("nowhere")


def test_a_folder_that_is_not_there_is_passed_over(tmp_path: Path) -> None:
    disk.place(tmp_path / "root", tmp_path / "missing")

    assert not (tmp_path / "root").exists()


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(HostError, match="false failed"):
        disk.run(["false"])
    with pytest.raises(HostError, match="no-such-program could not be run"):
        disk.run(["no-such-program"])
