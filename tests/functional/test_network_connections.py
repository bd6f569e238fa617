"""What goes on over old connections when a policy has changed, and after a sandbox has gone.

Links of the test stand for taps, as in `test_network_walls`.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.model.network import Protocol, parse_policy
from forkd.network import rules as rules_
from forkd.network import walls as walls_
from forkd.network.rules import Wall
from forkd.network.walls import Walls
from tests.support import outside as world
from tests.support.outside import FAMILIES, HOST_OUTSIDE, LINK, PLAN, Outside, outside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.network.plan import Slot

pytestmark = pytest.mark.needs("root", "nft")

PORT = 5_353
"""Where the resolver would listen."""

SERVICE, CLIENT = 9_000, 9_100
MTU = 1_400
SLOT = PLAN.slot(0)

_CONNECTIONS = Path("/proc/thread-self/net/nf_conntrack")

_UNREACHABLE = {socket.AF_INET: (3, 3), socket.AF_INET6: (1, 4)}
"""Type and code of ICMP errors for a port where nobody listens."""


@pytest.fixture(scope="module")
def outer() -> Iterator[Outside]:
    with outside(1) as made:
        yield made


class Walled:
    """The host's walls, and one sandbox."""

    def __init__(self, outer: Outside) -> None:
        self.outer = outer
        self.walls = Walls(PLAN)
        self.walls.listen_at(PORT)

    def put(self, *rules: str, held: bool = False, lease: str = "sb-0") -> Wall:
        policy = parse_policy(list(rules))
        assert policy is not None
        wall = Wall(lease, SLOT, policy, held)
        self.outer.host.run(lambda: self.walls.put([wall]))
        return wall

    def take(self) -> None:
        self.outer.host.run(lambda: self.walls.take([SLOT.tap]))

    def say(self, data: bytes, to: str) -> None:
        """Have the host itself send to the guest, which it may always."""
        self.outer.host.run(lambda: world.send(None, to, CLIENT, data))


@pytest.fixture
def walled(outer: Outside) -> Iterator[Walled]:
    made = Walled(outer)
    yield made
    made.take()


class Talk:
    """A guest, and a server of the world or the host to which it has sent a packet."""

    def __init__(
        self, walled: Walled, server: socket.socket, guest: socket.socket, to: str
    ) -> None:
        self._walled, self._server, self.guest = walled, server, guest
        guest.sendto(b"?", (to, SERVICE))
        question, self._peer = server.recvfrom(16)
        assert question == b"?"

    def answer(self, data: bytes) -> None:
        """Have the server send one packet more; it has passed or was dropped when this returns."""
        with contextlib.suppress(PermissionError):  # how the host is told that it was dropped
            self._server.sendto(data, self._peer)
        host, sender = self._walled.outer.host, self._walled.outer.world
        with host.run(lambda: world.listening(HOST_OUTSIDE[0], 9_001, socket.SOCK_DGRAM)) as heard:
            sender.run(lambda: world.send(None, HOST_OUTSIDE[0], 9_001, b"after that"))
            assert heard.recv(64) == b"after that"


@contextlib.contextmanager
def talk(walled: Walled, family: int, *, to_host: bool = False) -> Iterator[Talk]:
    """Have a guest ask a server of the world, or of the host."""
    to = (LINK if to_host else world.PUBLIC)[family]
    where = walled.outer.host if to_host else walled.outer.world
    mine = (SLOT.guest, SLOT.guest_v6)[family]
    kind = socket.SOCK_DGRAM
    with (
        where.run(lambda: world.listening(to, SERVICE, kind)) as server,
        walled.outer.guests[0].run(lambda: world.listening(mine, CLIENT, kind)) as guest,
    ):
        yield Talk(walled, server, guest, to)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("server", ["of the world", "of the host"])
@pytest.mark.parametrize("end", ["a tightened policy", "being held"])
def test_what_comes_in_over_an_old_connection_ends_with_what_allowed_it(
    walled: Walled, family: str, server: str, end: str
) -> None:
    rule = "internet" if server == "of the world" else "host"
    walled.put(rule)
    with talk(walled, FAMILIES[family], to_host=rule == "host") as talked:
        talked.answer(b"first")
        assert talked.guest.recv(16) == b"first"

        if end == "being held":
            walled.put(rule, held=True)
        else:
            walled.put("deny-all")
        talked.answer(b"late")
        walled.put(rule)
        talked.answer(b"again")

        assert talked.guest.recv(16) == b"again"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("before", ["deny-all", "internet"])
@pytest.mark.parametrize("after", ["deny-all", "internet"])
def test_the_next_sandbox_of_a_slot_gets_nothing_over_connections_of_the_last(
    walled: Walled, family: str, before: str, after: str
) -> None:
    number = FAMILIES[family]
    walled.put("internet")
    with talk(walled, number) as talked:
        talked.answer(b"first")
        assert talked.guest.recv(16) == b"first"
        walled.put(before)
        walled.take()
        walled.put(after, lease="sb-1")

        talked.answer(b"late")
        walled.say(b"the host's", (SLOT.guest, SLOT.guest_v6)[number])

        assert talked.guest.recv(16) == b"the host's"


def test_connections_of_a_sandbox_that_is_gone_are_forgotten_whatever_allowed_them(
    walled: Walled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walls_, "FORMER_MAX", 1)
    walled.put("internet")
    with talk(walled, 0), talk_at(walled, CLIENT + 1), talk_at(walled, CLIENT + 2):
        assert len(_connections(walled)) == 2, "that of the policy before the last is forgotten"
        walled.put("deny-all")

        walled.take()

        assert _connections(walled) == []


@contextlib.contextmanager
def talk_at(walled: Walled, port: int) -> Iterator[None]:
    """Have a guest send something under a policy of its own."""
    walled.put("internet", f"192.0.2.{port - CLIENT}")
    walled.outer.guests[0].run(lambda: _send_from(port, world.PUBLIC[0], SERVICE))
    yield


def _send_from(port: int, to: str, to_port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((SLOT.guest, port))
        sock.sendto(b"?", (to, to_port))


def _connections(walled: Walled) -> list[str]:
    """Return what the kernel knows of the guest's connections to the server."""
    with walled.outer.host.run(_CONNECTIONS.open) as listed:
        return [each for each in listed if f"src={SLOT.guest} dst={world.PUBLIC[0]} " in each]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "after",
    [
        ("203.0.113.0/24", "2001:db8:1::/48", "192.0.2.1"),
        ("203.0.113.0/24:9000", "[2001:db8:1::/48]:9000"),
        ("internet",),
    ],
    ids=["more", "less", "other rules"],
)
def test_a_connection_that_the_next_policy_allows_too_goes_on_whoever_speaks_first(
    walled: Walled, family: str, after: tuple[str, ...]
) -> None:
    number = FAMILIES[family]
    address = world.PUBLIC[number]
    server = walled.outer.world.run(lambda: world.listening(address, SERVICE))
    walled.put("203.0.113.0/24", "2001:db8:1::/48")
    client = walled.outer.guests[0].run(lambda: world.connected(address, SERVICE))
    with server, client, server.accept()[0] as accepted:
        walled.put(*after)

        accepted.send(b"from the server")
        assert client.recv(16) == b"from the server"

        walled.put("192.0.2.0/24")
        client.send(b"?")
        with pytest.raises(ConnectionResetError):
            client.recv(8)


@pytest.mark.parametrize(("family", "heads"), [("IPv4", 40), ("IPv6", 60)])
def test_both_ends_send_segments_that_the_way_out_takes(
    walled: Walled, family: str, heads: int
) -> None:
    """Whether or not somebody on the way says that longer ones are too long."""
    address = world.PUBLIC[FAMILIES[family]]
    host, server = walled.outer.host, partial(world.listening, address, SERVICE)
    walled.put("internet")
    host.mtu("up0", MTU)
    try:
        with (
            walled.outer.world.run(server) as listener,
            walled.outer.guests[0].run(partial(world.connected, address, SERVICE)) as client,
            listener.accept()[0] as accepted,
        ):
            for end in (client, accepted):
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= MTU - heads
        assert walled.outer.guests[0].run(partial(_send_too_much, address)) == errno.EMSGSIZE
    finally:
        host.mtu("up0", 1_500)


def _send_too_much(address: str) -> int | None:
    """Send a packet that the way out does not take; return what the host says of it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(world.DEADLINE_S)
        sock.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _DO)
        sock.connect((address, SERVICE))
        sock.send(bytes(1_450))
        try:
            sock.recv(1)
        except OSError as error:
            return error.errno
        return None


_MTU_DISCOVER, _DO = 10, 2
"""IP_MTU_DISCOVER, IP_PMTUDISC_DO (linux/in.h)."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", ["deny-all", "internet"])
def test_a_guest_ends_no_connection_of_the_host_by_errors_about_it(
    walled: Walled, family: str, rule: str
) -> None:
    number = FAMILIES[family]
    walled.put(rule)
    address, own = world.PUBLIC[number], HOST_OUTSIDE[number]
    with (
        walled.outer.world.run(lambda: world.listening(address, SERVICE, socket.SOCK_DGRAM)),
        walled.outer.host.run(lambda: _connected_from(own, address, SERVICE)) as sock,
    ):
        sock.send(b"?")
        port = sock.getsockname()[1]

        guest = walled.outer.guests[0]
        guest.run(lambda: _complain(LINK[number], own, port, address, SERVICE))
        guest.run(lambda: _complain(own, own, port, address, SERVICE))
        assert guest.run(lambda: world.attempt("icmp", LINK[number], 0)) == "refused"

        assert errno.errorcode.get(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) is None


def _connected_from(source: str, to: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((source, 0))
    sock.connect((to, port))
    return sock


def _complain(to: str, source: str, source_port: int, address: str, port: int) -> None:
    """Say, to `to`, that a packet from `source` to a port of `address` found nobody there."""
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    udp = struct.pack("!HHHH", source_port, port, 9, 0) + b"?"
    ends = socket.inet_pton(family, source) + socket.inet_pton(family, address)
    if family == socket.AF_INET6:
        packet = struct.pack("!IHBB", 6 << 28, len(udp), socket.IPPROTO_UDP, 64) + ends + udp
    else:
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 1, 0, 64, socket.IPPROTO_UDP, 0)
        summed = world.checksum(head + ends)
        packet = head[:10] + struct.pack("!H", summed) + ends + udp
    world.send_icmp(to, *_UNREACHABLE[family], packet)


def test_a_guest_learns_no_address_of_the_host_but_its_links(walled: Walled) -> None:
    walled.put("deny-all")

    def asked() -> str:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ARP)) as sock:
            sock.settimeout(world.DEADLINE_S)
            sock.bind(("eth0", _ARP))
            for address in (HOST_OUTSIDE[0], "127.0.0.1", PLAN.slot(0).host):
                sock.send(_who_has(SLOT, address))
            while True:
                got = sock.recv(128)
                if got[20:22] == _ARP_REPLY:
                    return socket.inet_ntoa(got[28:32])

    assert walled.outer.guests[0].run(asked) == SLOT.host, "the last that was asked for"


_ARP = 0x0806
_ARP_REPLY = b"\0\2"


def _who_has(slot: Slot, address: str) -> bytes:
    mac = bytes.fromhex(slot.mac.replace(":", ""))
    frame = b"\xff" * 6 + mac + struct.pack("!HHHBBH", _ARP, 1, 0x0800, 6, 4, 1)
    return frame + mac + socket.inet_aton(slot.guest) + bytes(6) + socket.inet_aton(address)


@pytest.mark.parametrize("family", FAMILIES)
def test_questions_count_as_connections(
    outer: Outside, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(rules_, "NETWORK_CONNECTIONS_MAX", 2)
    walled = Walled(outer)
    walled.put("deny-all")
    address = LINK[FAMILIES[family]]
    try:
        with outer.host.run(lambda: world.serving(outer.host, [(address, PORT)])):
            found = [
                outer.guests[0].run(partial(world.attempt, "udp", address, 53)) for _ in range(3)
            ]
        assert found == ["reached", "reached", "refused"]
    finally:
        walled.take()


def test_a_guest_asks_so_often_and_what_is_more_is_dropped_in_the_kernel(
    outer: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules_, "RESOLVER_QUESTIONS_PER_S_MAX", 1)
    monkeypatch.setattr(rules_, "RESOLVER_QUESTIONS_BURST_MAX", 10)
    walled = Walled(outer)
    walled.put("host")
    try:
        kind = socket.SOCK_DGRAM
        with (
            outer.host.run(lambda: world.listening(LINK[0], PORT, kind)) as resolver,
            outer.host.run(lambda: world.listening(LINK[0], 9_001, kind)) as heard,
        ):
            outer.guests[0].run(_ask_a_lot)
            assert heard.recv(64) == b"after that"
            resolver.settimeout(0)
            came = 0
            with contextlib.suppress(BlockingIOError):
                while resolver.recv(64):
                    came += 1
        assert 10 <= came <= 20
    finally:
        walled.take()


def _ask_a_lot() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _ in range(500):
            sock.sendto(b"?", (LINK[0], 53))
        sock.sendto(b"after that", (LINK[0], 9_001))


def test_an_opening_of_another_policy_or_sandbox_opens_nothing(walled: Walled) -> None:
    asked_under = walled.put("example.com:443")
    address = world.ip(world.PUBLIC[0])
    opening = rules_.Opening(SLOT.tap, address, Protocol.TCP, 443)

    def late() -> str:
        walled.outer.host.run(lambda: walled.walls.open_for([opening], 60, asked_under.mark))
        return walled.outer.try_(0, "tcp", world.PUBLIC[0], 443)

    walled.put("deny-all")
    assert late() == "refused"
    walled.put("example.com:443", held=True)
    assert late() == "refused"
    walled.take()
    walled.put("example.com:443", lease="sb-1")
    assert late() == "refused"
    walled.put("example.com:443")
    assert late() == "reached"


def test_the_mark_of_a_policy_is_its_sandboxs_alone() -> None:
    policy = parse_policy("internet")
    assert policy is not None
    first = Wall("sb-0", SLOT, policy)

    assert first.mark == replace(first, held=True, former=(1, 2)).mark
    assert first.mark != replace(first, lease="sb-1").mark
