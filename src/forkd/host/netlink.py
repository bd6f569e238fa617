"""Network links, through /dev/net/tun and netlink."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import struct
import sys
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import ForkdError, HostError
from forkd.host import nlmsg, tunables
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from forkd.host.nlmsg import Request

_TUN = "/dev/net/tun"
_SYSCTL = Path("/proc/sys/net")
_ROUTES = Path("/proc/net/route")
_ANY = IPv4Address(0)
_ISOLATED = {
    "ipv4/conf/{name}/forwarding": "0",
    "ipv4/conf/{name}/rp_filter": "1",
    "ipv4/conf/{name}/accept_redirects": "0",
    "ipv4/conf/{name}/send_redirects": "0",
    "ipv4/conf/{name}/arp_ignore": "1",  # answer for the link's own address, and no other
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
        HostError: The kernel refused, or this process may not make taps.
    """
    if not can_make_taps():
        raise HostError(
            f"cannot make the tap {name}: a sandbox has a network only if the daemon is root and "
            "has /dev/net/tun; start it with `sudo forkd up`, or fork without a network",
            tap=name,
        )
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
        with kernel_call(f"isolate {name}", tap=name), contextlib.suppress(FileNotFoundError):
            tunables.write(f"{_SYSCTL}/{path.format(name=name)}", value)


def set_up(links: Iterable[Link]) -> dict[str, ForkdError]:
    """Set links up and give them addresses; return what failed, by the name of its link.

    The kernel is told where a guest's IPv6 address is and asks the guest nothing: without an
    address of the link alone it could not ask on behalf of what it forwards.

    Raises:
        HostError: The kernel is not to be asked at all.
    """
    failed: dict[str, ForkdError] = {}
    asked: dict[str, list[Request]] = {}
    for link in links:
        try:
            with kernel_call(f"set up {link.name}"):
                asked[link.name] = _setting_up(link)
        except ForkdError as error:
            failed[link.name] = error
    with kernel_call("set up links"):
        said = iter(nlmsg.ask(list(chain.from_iterable(asked.values()))))
    for name, requests in asked.items():
        try:
            with kernel_call(f"set up {name}"):
                nlmsg.check(list(islice(said, len(requests))))
        except ForkdError as error:
            failed[name] = error
    return failed


def _setting_up(link: Link) -> list[Request]:
    index = _index(link.name)
    requests = [nlmsg.set_up(index)]
    for each in link.ends:
        requests.append(nlmsg.add_address(index, each.host, each.prefix_length))
        if ":" in each.guest:
            requests.append(nlmsg.set_neighbour(index, each.guest, link.mac))
    return requests


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
            tunables.write(_forwarding(name), "1" if on else "0")


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


def is_taken_here(address: str) -> bool:
    """Whether this host itself takes what it sends to an address: its own, broadcast, multicast.

    Raises:
        HostError: The kernel does not say.
    """
    with kernel_call(f"ask for the route to {address}"):
        return nlmsg.is_taken_here(address)


def routes() -> tuple[IPv4Network, ...]:
    """Return the IPv4 networks that the main table routes to, but for the default route.

    Raises:
        HostError: The kernel does not say.
    """
    with kernel_call(f"read {_ROUTES}"):
        lines = _ROUTES.read_text().splitlines()[1:]  # the first names the columns
    found = (line.split() for line in lines)
    pairs = ((_address(row[1]), _address(row[7])) for row in found)
    return tuple(IPv4Network(f"{to}/{mask}") for to, mask in pairs if mask != _ANY)


def _address(digits: str) -> IPv4Address:
    """Return an address as /proc/net/route has it: a word in the order of the processor."""
    return IPv4Address(int(digits, 16).to_bytes(4, sys.byteorder))


def forget_connections(marks: Iterable[int]) -> None:
    """Have the kernel forget the connections that bear one of these marks.

    Raises:
        HostError: The kernel refused.
    """
    requests = [nlmsg.forget_connections(mark) for mark in marks]
    if requests:
        with kernel_call("forget connections"):
            nlmsg.check(nlmsg.ask(requests, nlmsg.NETFILTER))


def _forwarding(name: str) -> Path:
    return _SYSCTL / "ipv4/conf" / name / "forwarding"


def clear_addresses(name: str) -> None:
    """Take every address from a link.

    Raises:
        HostError: The kernel refused, or there is no such link.
    """
    from pyroute2 import IPRoute  # noqa: PLC0415 - takes 60 ms to load, and few daemons need it
    from pyroute2.netlink.exceptions import NetlinkError  # noqa: PLC0415

    with kernel_call(f"clear {name}"):
        try:
            with IPRoute() as route:
                route.flush_addr(index=_index(name))
        except NetlinkError as error:
            raise OSError(error.code, os.strerror(error.code)) from error


def remove(links: Collection[str]) -> None:
    """Remove links; those that do not exist are fine.

    The kernel waits for a grace period for each request, so several are removed by one: as a
    group, with a number that is drawn for it, so that no link of others has it.

    Raises:
        HostError: The kernel refused.
    """
    with kernel_call(f"remove {', '.join(links)}"):
        indexes = [index for index in map(_index_if_there, links) if index is not None]
        if indexes:
            group = 1 + secrets.randbits(_GROUP_BITS)
            grouped = [nlmsg.put_in_group(index, group) for index in indexes]
            said = nlmsg.ask([*grouped, nlmsg.delete_group(group)])
            nlmsg.check([number for number in said if number != errno.ENODEV])


def _index_if_there(name: str) -> int | None:
    try:
        return _index(name)
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        return None


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
