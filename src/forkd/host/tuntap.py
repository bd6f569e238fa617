"""Opening taps, for those who may not."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct

from forkd.host.faults import kernel_call

FRAMES_MAX = 1_000
"""Most frames that wait in a tap: what the kernel gives its queue."""

_FRAME_BYTES_MAX = 1 << 16
_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFREQ = struct.Struct("16sH22x")


def open_tap(name: str) -> int:
    """Return a descriptor of a tap that exists, to send and receive frames by.

    Raises:
        HostError: There is none, or it is in use.
        CapacityError: There are too many open files.
    """
    with kernel_call(f"open tap {name}"):
        opened = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(opened, _TUNSETIFF, _IFREQ.pack(name.encode(), _IFF_TAP | _IFF_NO_PI))
        except BaseException:
            os.close(opened)
            raise
        return opened


def drain(descriptor: int) -> None:
    """Drop the frames that wait in a tap, of which there are at most `FRAMES_MAX`.

    Raises:
        HostError: It is gone.
    """
    with kernel_call("read a tap"), contextlib.suppress(BlockingIOError):
        for _ in range(FRAMES_MAX):
            os.read(descriptor, _FRAME_BYTES_MAX)
