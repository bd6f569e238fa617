"""The disk under a folder is found, whole, or said not to be one."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkd.errors import HostError
from forkd.host import disks


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Return a folder like the kernel's: a disk with one partition, and a mapped device."""
    disk, mapped = tmp_path / "pci" / "block" / "sda", tmp_path / "virtual" / "block" / "dm-0"
    part, named = disk / "sda1", tmp_path / "dev"
    for folder, number in ((disk, "8:0"), (part, "8:1"), (mapped, "253:0")):
        folder.mkdir(parents=True)
        (folder / "dev").write_text(f"{number}\n")
    (part / "partition").write_text("1\n")
    named.mkdir()
    for folder in (disk, part, mapped):
        (named / (folder / "dev").read_text().strip()).symlink_to(folder)
    return named


@pytest.mark.parametrize(
    ("device", "disk"),
    [("8:0", "8:0"), ("8:1", "8:0"), ("253:0", "253:0"), ("0:42", None)],
)
def test_of_a_partition_it_is_the_disk_and_of_no_device_none(
    devices: Path, device: str, disk: str | None
) -> None:
    assert disks.whole(device, devices) == disk


def test_what_is_in_memory_is_on_no_disk() -> None:
    assert disks.disk_of(Path("/proc")) is None


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="none"):
        disks.disk_of(tmp_path / "none")


def test_the_kind_of_a_file_system_is_the_kernels_word() -> None:
    mounts = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 0:42 / /srv rw - fuse.sshfs somewhere rw\n"
    )

    assert disks.kind_of("8:1", mounts) == "ext4"
    assert disks.kind_of("0:42", mounts) == "fuse.sshfs"
    assert disks.kind_of("8:2", mounts) is None


def test_a_folder_that_is_to_be_made_lies_where_its_parent_does(tmp_path: Path) -> None:
    assert disks.file_system(tmp_path / "not" / "there") == disks.file_system(tmp_path)
    assert disks.file_system(Path("/proc")).kind == "proc"
