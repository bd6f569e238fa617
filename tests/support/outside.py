"""An outside for guests, all of it in namespaces of the test: servers, and a host between.

    guest 0 ─┐
    guest 1 ─┼─ host ── world     the world has documentation addresses, private ones, metadata
    guest 2 ─┘

The guests' links have the names and addresses of a plan's slots, as taps would, so the host's walls
cannot tell them from sandboxes.  Nothing has a route to anywhere else.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import TYPE_CHECKING

from forkd.network import taps
from forkd.network.plan import PREFIX_LENGTH, PREFIX_LENGTH_V6, Plan
from tests.support.namespaces import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forkd.network.ranges import Address

PLAN = Plan(pool=IPv4Network("10.213.0.0/24"), tap_prefix="fkt")

PUBLIC = ("203.0.113.10", "2001:db8:1::10")
SHARED = PUBLIC
"""Where two names live: one that is allowed, and another."""
OTHER = ("192.0.2.20", "2001:db8:2::20")
PRIVATE = ("10.99.0.1", "fd00:99::1")
METADATA = ("169.254.169.254", "fd00:ec2::254")
HOST_OUTSIDE = ("198.51.100.1", "2001:db8:ffff::1")
"""The host's own address on its way out."""

NAME_SERVER = "203.0.113.53"
"""Where a test may serve names."""

PORTS = (53, 80, 443, 853)
"""Where servers listen on every address of the world."""

LINK = (PLAN.slot(0).host, PLAN.slot(0).host_v6)
SIBLING = (PLAN.slot(1).guest, PLAN.slot(1).guest_v6)
SIBLINGS_LINK = (PLAN.slot(1).host, PLAN.slot(1).host_v6)

FAMILIES = {"IPv4": 0, "IPv6": 1}
PROTOCOLS = ("tcp", "udp", "icmp")

CELLS: dict[str, tuple[tuple[str, str], int]] = {
    "public": (PUBLIC, 443),
    "other port": (PUBLIC, 80),
    "other address": (OTHER, 443),
    "DNS elsewhere": (OTHER, 53),
    "DoT": (OTHER, 853),
    "private": (PRIVATE, 443),
    "metadata": (METADATA, 80),
    "host, own link": (LINK, 443),
    "host, other link": (SIBLINGS_LINK, 443),
    "host, outside": (HOST_OUTSIDE, 443),
    "sibling": (SIBLING, 443),
}
"""Destinations of guest 0 by name: addresses of both families, and a port.  Port 443 of another
address is what DNS over HTTPS is to a packet filter."""

PUBLIC_CELLS = frozenset({"public", "other port", "other address", "DNS elsewhere", "DoT"})
CIDRS = (
    "203.0.113.0/24:443",
    "[2001:db8:1::/48]:443",
    "203.0.113.0/24/icmp",
    "[2001:db8:1::]/48/icmp",
)

REACHED: dict[tuple[str, ...], frozenset[str]] = {
    ("deny-all",): frozenset(),
    ("internet",): PUBLIC_CELLS,
    ("host",): frozenset({"host, own link"}),
    CIDRS: frozenset({"public"}),
    ("10.99.0.0/16", "[fd00:99::/32]"): frozenset({"private"}),
    ("169.254.169.254", "[fd00:ec2::254]"): frozenset({"metadata"}),
    ("0.0.0.0/0", "[::/0]"): PUBLIC_CELLS,
    ("10.0.0.0/8", "[fc00::/7]"): frozenset({"private"}) | frozenset({"metadata (IPv6)"}),
    ("internet", "host"): PUBLIC_CELLS | {"host, own link"},
}
"""What each policy reaches; everything else it is refused.

A range that holds all private addresses holds siblings and links, too, and still does not reach
them.  The metadata service has a private address in IPv6.
"""

ROUTER = "fe80::2"
"""Who may `advertise`."""

_ROUTER_ADVERTISEMENT = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1_800, 0, 0)
_PREFIX_TO_MAKE_ADDRESSES_OF = struct.pack("!BBBBIII", 3, 4, 64, 0xC0, 3_600, 3_600, 0)

DEADLINE_S = 10.0

REFUSALS = frozenset(
    {errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.EACCES, errno.ENETUNREACH}
)


@dataclass(frozen=True)
class Outside:
    """The host, the world, and guests."""

    host: Namespace
    world: Namespace
    guests: tuple[Namespace, ...]

    def try_(self, guest: int, protocol: str, address: str, port: int) -> str:
        """Have a guest try a destination; return `reached`, `refused` or `silence`."""
        return self.guests[guest].run(lambda: attempt(protocol, address, port))

    def try_all(self, protocol: str, family: int) -> dict[str, str]:
        """Have guest 0 try every cell; return what came of each."""
        return {
            cell: self.try_(0, protocol, addresses[family], port)
            for cell, (addresses, port) in CELLS.items()
        }


def expected(rules: tuple[str, ...], protocol: str, family: str) -> dict[str, str]:
    """Return what is to come of each cell under one of the policies of `REACHED`."""
    reached = {each.replace(f" ({family})", "") for each in REACHED[rules]}
    same = {"other port"} if protocol == "icmp" and "public" in reached else set()
    return {cell: "reached" if cell in reached | same else "refused" for cell in CELLS}


@contextlib.contextmanager
def outside(guests: int = 2) -> Iterator[Outside]:
    """Make an outside for the block."""
    with contextlib.ExitStack() as stack:
        host, world = (stack.enter_context(Namespace()) for _ in range(2))
        host.link("up0", world, "down0")
        host.address("up0", "198.51.100.1/24", "2001:db8:ffff::1/64")
        world.address("down0", "198.51.100.2/24", "2001:db8:ffff::2/64")
        here = [each for pair in (PUBLIC, OTHER, PRIVATE, METADATA) for each in pair]
        world.address("lo", *(f"{each}/{_bits(each)}" for each in (*here, NAME_SERVER)))
        host.gateway("198.51.100.2", "2001:db8:ffff::2")
        for setting in ("ipv4/icmp_ratelimit", "ipv6/icmp/ratelimit"):
            host.sysctl(setting, "0")  # else the host says only once a second what it refuses
        made = tuple(stack.enter_context(_guest(host, index)) for index in range(guests))
        stack.enter_context(_served(world, here))
        of_host = [LINK, HOST_OUTSIDE, *([SIBLINGS_LINK] if guests > 1 else [])]
        stack.enter_context(serving(host, [(each, 443) for pair in of_host for each in pair]))
        if guests > 1:
            stack.enter_context(serving(made[1], [(each, 443) for each in SIBLING]))
        yield Outside(host, world, made)


@contextlib.contextmanager
def _guest(host: Namespace, index: int) -> Iterator[Namespace]:
    slot = PLAN.slot(index)
    with Namespace() as guest:
        for end in (host, guest):
            end.sysctl("ipv6/conf/default/addr_gen_mode", "1")  # as taps, and as the agent does
        host.link(slot.tap, guest, "eth0", mac=slot.mac)
        host.run(lambda: taps.prepare(slot))
        guest.address(
            "eth0", f"{slot.guest}/{PREFIX_LENGTH}", f"{slot.guest_v6}/{PREFIX_LENGTH_V6}"
        )
        guest.gateway(slot.host, slot.host_v6)
        yield guest


def attempt(protocol: str, address: str, port: int) -> str:
    """Try a destination in this thread's namespace."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        if protocol == "icmp":
            return _ping(family, address)
        kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
        with socket.socket(family, kind) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect((address, port))
            sock.send(b"?")
            return "reached" if sock.recv(16) else "refused"
    except TimeoutError:
        return "silence"
    except OSError as error:
        if error.errno in REFUSALS:
            return "refused"
        raise


def _ping(family: int, address: str) -> str:
    ask, answer, unreachable = (128, 129, 1) if family == socket.AF_INET6 else (8, 0, 3)
    token = os.urandom(8)
    with _icmp_socket(family) as sock:
        sock.settimeout(DEADLINE_S)
        sock.sendto(_icmp(family, ask, 0, struct.pack("!HH", 1, 1), token), (address, 0))
        while True:
            got = sock.recv(2048)
            message = got[(got[0] & 15) * 4 :] if family == socket.AF_INET else got
            if token in message and message[0] == answer:
                return "reached"
            if token in message and message[0] == unreachable:
                return "refused"


def send_icmp(address: str, kind: int, code: int, about: bytes) -> None:
    """Send an ICMP error about a packet from this thread's namespace."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with _icmp_socket(family) as sock:
        sock.sendto(_icmp(family, kind, code, bytes(4), about), (address, 0))


def _icmp_socket(family: int) -> socket.socket:
    protocol = socket.IPPROTO_ICMPV6 if family == socket.AF_INET6 else socket.IPPROTO_ICMP
    return socket.socket(family, socket.SOCK_RAW, protocol)


def _icmp(family: int, kind: int, code: int, head: bytes, body: bytes) -> bytes:
    message = struct.pack("!BBH", kind, code, 0) + head + body
    if family == socket.AF_INET6:  # of IPv6 the kernel makes the sum
        return message
    return message[:2] + struct.pack("!H", checksum(message)) + message[4:]


def checksum(body: bytes) -> int:
    """Return the sum of a header of the internet protocols (RFC 1071)."""
    padded = body + bytes(len(body) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


@contextlib.contextmanager
def serving(namespace: Namespace, places: list[tuple[str, int]]) -> Iterator[None]:
    """Answer every TCP connection and UDP packet with one byte, at addresses and ports."""

    def bind() -> list[socket.socket]:
        return [_listen(*place, kind) for place in places for kind in _KINDS]

    sockets = namespace.run(bind)
    reading, writing = socket.socketpair()
    selector = readable(*sockets, reading)
    thread = threading.Thread(target=_serve, args=(selector, reading))
    thread.start()
    try:
        yield
    finally:
        writing.close()
        thread.join()
        selector.close()
        for each in (reading, *sockets):
            each.close()


_KINDS = (socket.SOCK_STREAM, socket.SOCK_DGRAM)


def _served(world: Namespace, addresses: list[str]) -> contextlib.AbstractContextManager[None]:
    return serving(world, [(address, port) for address in addresses for port in PORTS])


def _listen(address: str, port: int, kind: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.bind((address, port))
    if kind == socket.SOCK_STREAM:
        sock.listen()
    return sock


def readable(*sockets: socket.socket) -> selectors.BaseSelector:
    """Return a selector of what can be read; close it.

    A thread that made its own might do so at any time, also while a test's descriptors are counted.
    """
    selector = selectors.DefaultSelector()
    for each in sockets:
        selector.register(each, selectors.EVENT_READ)
    return selector


def _serve(selector: selectors.BaseSelector, until: socket.socket) -> None:
    while True:
        for key, _ in selector.select():
            sock = key.fileobj
            if sock is until:
                return
            _answer(sock)  # type: ignore[arg-type]  # we registered sockets


def _answer(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        if sock.type == socket.SOCK_STREAM:
            accepted = sock.accept()[0]
            with accepted:
                accepted.settimeout(DEADLINE_S)
                accepted.recv(16)
                accepted.send(b"!")
        else:
            _, who = sock.recvfrom(2048)
            sock.sendto(b"!", who)


def ip(text: str) -> Address:
    """Return an address."""
    return ipaddress.ip_address(text)


def listening(address: str, port: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Return a socket of this thread's namespace that takes what comes to an address."""
    sock = _listen(address, port, kind)
    sock.settimeout(DEADLINE_S)
    return sock


def connected(address: str, port: int) -> socket.socket:
    """Return a connection from this thread's namespace."""
    return socket.create_connection((address, port), DEADLINE_S)


def send(source: str | None, address: str, port: int, data: bytes) -> None:
    """Send one packet from this thread's namespace, from an address of it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        if source is not None:
            sock.bind((source, 0))
        sock.sendto(data, (address, port))


def solicit(address: str) -> str:
    """Ask an address for its neighbours, as if it were on this link; return what came of it."""
    token = os.urandom(16)
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as sock:
        sock.settimeout(DEADLINE_S)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 255)
        sock.sendto(struct.pack("!BBHI", 135, 0, 0, 0) + token, (address, 0))
        try:
            while True:
                got = sock.recv(2048)
                if token in got and got[0] == 1:
                    return "refused"
        except TimeoutError:
            return "silence"


def advertise(link: str, prefix: str) -> None:
    """Claim to be a router on a link of this thread's namespace, and to know addresses for it.

    Routers speak from an address of the link alone: the link is to have `ROUTER`, since the kernel
    makes such an address only once it has noticed that the other end is there.
    """
    option = _PREFIX_TO_MAKE_ADDRESSES_OF + ipaddress.IPv6Address(prefix).packed
    index = socket.if_nametoindex(link)
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as sock:
        sock.bind((ROUTER, 0, 0, index))
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        sock.sendto(_ROUTER_ADVERTISEMENT + option, ("ff02::1", 0, 0, index))


def swallow(sock: socket.socket) -> float:
    """Take all that comes over a connection; return how long that took."""
    began_s = time.monotonic()
    while sock.recv(1 << 16):
        pass
    return time.monotonic() - began_s


def knock(address: str, ports: Iterable[int]) -> None:
    """Try to connect to ports, whatever comes of it."""
    for port in ports:
        with contextlib.suppress(OSError):
            connected(address, port).close()


def _bits(address: str) -> int:
    return ip(address).max_prefixlen
