"""Network links, through /dev/net/tun and netlink.

The library is loaded when the kernel is first asked: loading it takes 60 ms, and a daemon without
sandboxes that have a network never does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import ForkdError
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from pyroute2 import IPRoute
    from pyroute2.netlink.nfnetlink.nfctsocket import NFCTSocket

_TUN = "/dev/net/tun"
_SYSCTL = Path("/proc/sys/net")
_ISOLATED = {
    "ipv4/conf/{name}/forwarding": "0",
    "ipv4/conf/{name}/rp_filter": "1",
    "ipv4/conf/{name}/accept_redirects": "0",
    "ipv4/conf/{name}/send_redirects": "0",
}
"""What is written below `/proc/sys/net` for a link to a guest."""

_ISOLATED_V6 = {
    "ipv6/conf/{name}/accept_ra": "0",
    "ipv6/conf/{name}/autoconf": "0",
    "ipv6/conf/{name}/accept_redirects": "0",
    "ipv6/conf/{name}/accept_dad": "0",
    "ipv6/conf/{name}/addr_gen_mode": "1",  # none: no address of the link alone
    "ipv6/conf/{name}/forwarding": "0",
    "ipv6/conf/{name}/disable_ipv6": "0",
}
"""Likewise, if it has IPv6; the last switches it on, if the host's default is off."""

_WITHOUT_V6 = {"ipv6/conf/{name}/disable_ipv6": "1"}
_ALL_V6 = _SYSCTL / "ipv6/conf/all"
_GROUP_BITS = 30
"""Bits of the number that is drawn for a group of links; 0 is that of all links."""

_IFA_F_NODAD = 0x02
_NUD_PERMANENT = 0x80

_TUNSETIFF = 0x400454CA
_TUNSETPERSIST = 0x400454CB
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_SIOCGIFINDEX = 0x8933
_IFINDEX = struct.Struct("16si20x")
_IFREQ = struct.Struct("16sH22x")


@dataclass(frozen=True, slots=True)
class Ends:
    """The addresses of a link's two ends.

    Attributes:
        host: Ours.
        guest: The other one's.
        prefix_length: Of the network that they share.
    """

    host: str
    guest: str
    prefix_length: int


@dataclass(frozen=True, slots=True)
class Link:
    """A link to a guest.

    Attributes:
        name: Of our end.
        mac: Hardware address of the other end.
        ends: Its addresses.
    """

    name: str
    mac: str
    ends: tuple[Ends, ...]


def has_ipv6() -> bool:
    """Whether this host has IPv6, and uses it."""
    with contextlib.suppress(OSError):
        return (_ALL_V6 / "disable_ipv6").read_text().strip() == "0"
    return False


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


def isolate(name: str, *, ipv6: bool) -> None:
    """Have the host neither learn from a link, which is down, nor forward what comes from it.

    Router advertisements of a guest do not make it the host's router, nor redirects; packets are
    not forwarded, whatever the host's default is; those from addresses that are not the link's are
    dropped.  Kernels without IPv6 have nothing to set (`Documentation/networking/ip-sysctl.rst`).

    Args:
        name: The link.
        ipv6: Whether it has IPv6 at all.

    Raises:
        HostError: The kernel refused, or there is no such link.
    """
    for path, value in (_ISOLATED | (_ISOLATED_V6 if ipv6 else _WITHOUT_V6)).items():
        setting = _SYSCTL / path.format(name=name)
        with kernel_call(f"isolate {name}", tap=name), contextlib.suppress(FileNotFoundError):
            setting.write_text(value)


def set_up(links: Iterable[Link]) -> dict[str, ForkdError]:
    """Set links up and give them addresses; return what failed, by the name of its link.

    The kernel is told where a guest's IPv6 address is and asks the guest nothing: without an
    address of the link alone it could not ask on behalf of what it forwards.

    Raises:
        HostError: The kernel is not to be asked at all.
    """
    failed: dict[str, ForkdError] = {}
    with _netlink("set up links") as route:
        for link in links:
            try:
                with _asking(f"set up {link.name}"):
                    _set_up(route, link)
            except ForkdError as error:
                failed[link.name] = error
    return failed


def _set_up(route: IPRoute, link: Link) -> None:
    index = _index(link.name)
    route.link("set", index=index, state="up")
    for each in link.ends:
        address, length = each.host, each.prefix_length
        if ":" not in address:
            route.addr("add", index=index, address=address, prefixlen=length)
            continue
        route.addr("add", index=index, address=address, prefixlen=length, flags=_IFA_F_NODAD)
        route.neigh(
            "replace",
            ifindex=index,
            family=socket.AF_INET6,
            dst=each.guest,
            lladdr=link.mac,
            state=_NUD_PERMANENT,
        )


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


def forwards_ipv6() -> bool:
    """Whether this host forwards IPv6 packets; there is no such switch for one link.

    Raises:
        HostError: The kernel does not say.
    """
    with kernel_call("look whether IPv6 is forwarded"):
        return (_ALL_V6 / "forwarding").read_text().strip() != "0"


def learning(but: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the links that learn routers as long as the host does not forward IPv6.

    `default` is among them if links that come later do.

    Args:
        but: Tells which links do not count; loopback never does.

    Raises:
        HostError: The kernel does not say.
    """
    found = []
    for name in (*names(), "default"):
        with kernel_call(f"look at {name}"), contextlib.suppress(FileNotFoundError):
            if name != "lo" and not but(name) and _accept_ra(name).read_text().strip() == "1":
                found.append(name)
    return tuple(found)


def forward_ipv6(links: Iterable[str]) -> None:
    """Have IPv6 packets forwarded, and links learn routers all the same; gone ones are fine.

    In this order: the kernel forgets the routes that it has learned of links that will not learn.

    Raises:
        HostError: The kernel refused.
    """
    _learn(links, before="1", after="2")
    with kernel_call("forward IPv6"):
        (_ALL_V6 / "forwarding").write_text("1")


def stop_forwarding_ipv6(links: Iterable[str]) -> None:
    """Undo `forward_ipv6`; a link that somebody else has set since stays as it is.

    Raises:
        HostError: The kernel refused.
    """
    with kernel_call("forward IPv6 no more"):
        (_ALL_V6 / "forwarding").write_text("0")
    _learn(links, before="2", after="1")


def _learn(links: Iterable[str], *, before: str, after: str) -> None:
    for name in links:
        setting = _accept_ra(name)
        with kernel_call(f"set {setting}"), contextlib.suppress(FileNotFoundError):
            if setting.read_text().strip() == before:
                setting.write_text(after)


def _accept_ra(name: str) -> Path:
    return _SYSCTL / "ipv6/conf" / name / "accept_ra"


def forget_connections(marks: Iterable[int]) -> None:
    """Have the kernel forget the connections that bear one of these marks.

    Raises:
        HostError: The kernel refused.
    """
    marks = tuple(marks)
    if not marks:
        return
    with _netfilter("forget connections") as tracked:
        for mark in marks:
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


def remove(links: Collection[str]) -> None:
    """Remove links; those that do not exist are fine.

    The kernel waits for a grace period for each request, so several are removed by one: as a
    group, with a number that is drawn for it, so that no link of others has it.

    Raises:
        HostError: The kernel refused.
    """
    if not links:
        return
    with _netlink(f"remove {', '.join(links)}") as route:
        if len(links) == 1:
            with _gone_is_fine():
                route.link("del", index=_index(*links))
            return
        group = 1 + secrets.randbits(_GROUP_BITS)
        for name in links:
            with _gone_is_fine():
                route.link("set", index=_index(name), group=group)
        with _gone_is_fine():
            route.link("del", index=0, IFLA_GROUP=group)


@contextlib.contextmanager
def _gone_is_fine() -> Iterator[None]:
    from pyroute2.netlink.exceptions import NetlinkError  # noqa: PLC0415 - slow to load

    try:
        yield
    except (NetlinkError, OSError) as error:
        if errno.ENODEV not in {getattr(error, "errno", None), getattr(error, "code", None)}:
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
    from pyroute2.netlink.nfnetlink.nfctsocket import NFCTSocket  # noqa: PLC0415 - slow to load

    with _asking(doing), NFCTSocket() as tracked:
        yield tracked


@contextlib.contextmanager
def _netlink(doing: str) -> Iterator[IPRoute]:
    from pyroute2 import IPRoute  # noqa: PLC0415 - slow to load

    with _asking(doing), IPRoute() as route:
        yield route


@contextlib.contextmanager
def _asking(doing: str) -> Iterator[None]:
    from pyroute2.netlink.exceptions import NetlinkError  # noqa: PLC0415 - slow to load

    with kernel_call(doing):
        try:
            yield
        except NetlinkError as error:
            raise OSError(error.code, os.strerror(error.code)) from error
