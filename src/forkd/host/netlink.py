"""Network links, through /dev/net/tun and netlink."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTSocket

from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_TUN = "/dev/net/tun"
_SYSCTL = Path("/proc/sys/net")
_ISOLATED = {
    "ipv6/conf/{name}/disable_ipv6": "1",
    "ipv4/conf/{name}/forwarding": "0",
    "ipv4/conf/{name}/rp_filter": "1",
    "ipv4/conf/{name}/accept_redirects": "0",
    "ipv4/conf/{name}/send_redirects": "0",
}
"""What is written below `/proc/sys/net` for a link to a guest."""

_TUNSETIFF = 0x400454CA
_TUNSETPERSIST = 0x400454CB
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_SIOCGIFINDEX = 0x8933
_IFINDEX = struct.Struct("16si20x")
_IFREQ = struct.Struct("16sH22x")


def can_make_taps() -> bool:
    """Whether taps can be made here."""
    return os.access(_TUN, os.R_OK | os.W_OK) and os.geteuid() == 0


def add_tap(name: str) -> None:
    """Make a tap that stays until it is removed, down and without an address.

    Raises:
        HostError: The kernel refused.
    """
    request = _IFREQ.pack(name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR)
    with kernel_call(f"make the tap {name}", tap=name):
        descriptor = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, _TUNSETIFF, request)
            fcntl.ioctl(descriptor, _TUNSETPERSIST, 1)
        finally:
            os.close(descriptor)


def isolate(name: str) -> None:
    """Have the host neither learn from a link nor forward what comes from it.

    IPv6 is off, so that router advertisements of a guest do not make it the host's router; packets
    are not forwarded, whatever the host's default is; those from addresses that are not the
    link's are dropped.  Kernels without IPv6 have nothing to switch off
    (`Documentation/networking/ip-sysctl.rst`).

    Raises:
        HostError: The kernel refused, or there is no such link.
    """
    for path, value in _ISOLATED.items():
        setting = _SYSCTL / path.format(name=name)
        with kernel_call(f"isolate {name}", tap=name), contextlib.suppress(FileNotFoundError):
            setting.write_text(value)


def set_up(name: str, address: str, prefix_length: int) -> None:
    """Give a link an address and set it up.

    Raises:
        HostError: The kernel refused, or there is no such link.
    """
    with _netlink(f"set up {name}") as route:
        index = _index(name)
        route.addr("add", index=index, address=address, prefixlen=prefix_length)
        route.link("set", index=index, state="up")


def not_forwarding(but: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the links that do not forward IPv4 packets that come from them.

    Args:
        but: Tells which links do not count; loopback never does.

    Raises:
        HostError: The kernel does not say.
    """
    found = []
    for name in names():
        with kernel_call(f"look at {name}"), contextlib.suppress(FileNotFoundError):
            if name != "lo" and not but(name) and _forwarding(name).read_text().strip() == "0":
                found.append(name)
    return tuple(found)


def forward(links: Iterable[str], *, on: bool) -> None:
    """Have IPv4 packets that come from links forwarded, or not; links that are gone are fine.

    Raises:
        HostError: The kernel refused.
    """
    for name in links:
        with kernel_call(f"forward what comes from {name}"), contextlib.suppress(FileNotFoundError):
            _forwarding(name).write_text("1" if on else "0")


def forget_connections(marks: Iterable[int]) -> None:
    """Have the kernel forget the connections that bear one of these marks.

    Raises:
        HostError: The kernel refused.
    """
    for mark in marks:
        with _netfilter("forget connections") as tracked:
            tracked.flush(mark=mark, mark_mask=0xFFFF_FFFF)


def _forwarding(name: str) -> Path:
    return _SYSCTL / "ipv4/conf" / name / "forwarding"


def clear_addresses(name: str) -> None:
    """Take every address from a link.

    Raises:
        HostError: The kernel refused, or there is no such link.
    """
    with _netlink(f"clear {name}") as route:
        route.flush_addr(index=_index(name))


def remove(name: str) -> None:
    """Remove a link; one that does not exist is fine.

    Raises:
        HostError: The kernel refused.
    """
    with _netlink(f"remove {name}") as route:
        try:
            route.link("del", index=_index(name))
        except (NetlinkError, OSError) as error:
            if errno.ENODEV not in {error.errno, getattr(error, "code", None)}:
                raise


def names() -> tuple[str, ...]:
    """Return the names of all links.

    Raises:
        HostError: The kernel does not say.
    """
    with kernel_call("list network links"):
        return tuple(name for _, name in socket.if_nameindex())


def _index(name: str) -> int:
    """Return the number of a link; `socket.if_nametoindex` does not say what the kernel said.

    Raises:
        OSError: ENODEV if there is none of that name.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asked:
        raw = fcntl.ioctl(asked.fileno(), _SIOCGIFINDEX, _IFINDEX.pack(name.encode(), 0))
    return int(_IFINDEX.unpack(raw)[1])


@contextlib.contextmanager
def _netfilter(doing: str) -> Iterator[NFCTSocket]:
    with kernel_call(doing):
        try:
            with NFCTSocket() as tracked:
                yield tracked
        except NetlinkError as error:
            raise OSError(error.code, os.strerror(error.code)) from error


@contextlib.contextmanager
def _netlink(doing: str) -> Iterator[IPRoute]:
    with kernel_call(doing):
        try:
            with IPRoute() as route:
                yield route
        except NetlinkError as error:
            raise OSError(error.code, os.strerror(error.code)) from error
