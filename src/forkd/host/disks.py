"""Which disk a folder lies on, in the kernel's words.

A file system knows the device that it is on, which may be a part of a disk; the kernel limits whole
disks.  What is on several devices, on a network or in memory has a number that names no device.

Source: the kernel's Documentation/ABI/testing/sysfs-block, and makedev(3).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from forkd.host.faults import kernel_call

BLOCK_DEVICES = Path("/sys/dev/block")
"""Where the kernel has a link for each block device, named by its number."""


MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What a folder lies on.

    Attributes:
        kind: The file system's kind, as the kernel calls it.
        rotates: Whether its disk has parts that move; not known of a virtual disk, which says so
            whatever it is made of.
    """

    kind: str
    rotates: bool


def file_system(folder: Path) -> FileSystem:
    """Return what a folder lies on, or would if it were made.

    Raises:
        HostError: The kernel does not say.
    """
    with kernel_call(f"look at the file system of {folder}"):
        while not folder.exists():
            folder = folder.parent
        number = folder.stat().st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        kind = kind_of(device, MOUNTS.read_text(encoding="utf-8"))
        disk = whole(device, BLOCK_DEVICES)
        rotates = disk is not None and _rotates((BLOCK_DEVICES / disk).resolve())
    return FileSystem(kind or "unknown", rotates)


def _rotates(disk: Path) -> bool:
    rotational = disk / "queue/rotational"
    is_virtual = "/virtio" in str(disk) or not rotational.exists()
    return not is_virtual and rotational.read_text(encoding="ascii").strip() == "1"


def kind_of(device: str, mounts: str) -> str | None:
    """Return the kind of the file system with a number; None if it is mounted nowhere.

    Args:
        device: Its number, as `major:minor`.
        mounts: What the kernel says is mounted: mountinfo of proc(5).
    """
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == device:
            return after.split()[0]
    return None


def disk_of(folder: Path) -> str | None:
    """Return the disk that a folder's file system is on, as `major:minor`; None if on no one disk.

    Raises:
        HostError: There is no such folder, or the kernel does not say.
    """
    with kernel_call(f"look at {folder}"):
        device = folder.stat().st_dev
    return whole(f"{os.major(device)}:{os.minor(device)}", BLOCK_DEVICES)


def whole(device: str, devices: Path) -> str | None:
    """Return the disk that a block device is, or is a part of; None if it is no block device.

    Args:
        device: Its number, as `major:minor`.
        devices: Where the kernel has its devices.

    Raises:
        HostError: The kernel does not say.
    """
    with kernel_call(f"look at the block device {device}"):
        try:
            place = (devices / device).resolve(strict=True)
        except FileNotFoundError:
            return None
        if not (place / "partition").exists():
            return device
        return (place.parent / "dev").read_text().strip()
