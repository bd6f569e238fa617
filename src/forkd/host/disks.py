"""Which disk a folder lies on, in the kernel's words.

A file system knows the device that it is on, which may be a part of a disk; the kernel limits whole
disks.  What is on several devices, on a network or in memory has a number that names no device.

Source: the kernel's Documentation/ABI/testing/sysfs-block, and makedev(3).
"""

from __future__ import annotations

import os
from pathlib import Path

from forkd.host.faults import kernel_call

BLOCK_DEVICES = Path("/sys/dev/block")
"""Where the kernel has a link for each block device, named by its number."""


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
