"""What guests reach: every cell of policies against destinations, in namespaces of the test.

Links of the test stand for taps, so the host's walls are the very ones of sandboxes; the servers
are real.  Nothing here has a route to anywhere else.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.errors import CapacityError, HostError
from forkd.host import netlink, nftables
from forkd.limits import NETWORK_CONNECTIONS_MAX
from forkd.model.network import NetworkPolicy, Protocol, parse_policy
from forkd.network import rules as rules_
from forkd.network import walls as walls_
from forkd.network.plan import Plan
from forkd.network.rules import Opening, Wall
from forkd.network.walls import Refusals, Walls
from tests.support import outside as world
from tests.support.namespaces import Namespace
from tests.support.outside import (
    CELLS,
    FAMILIES,
    LINK,
    PLAN,
    PROTOCOLS,
    REACHED,
    SIBLING,
    SIBLINGS_LINK,
    Outside,
    expected,
    outside,
    serving,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.needs("root", "nft")

PORT = 5_353
"""Where the resolver would listen."""

_LEARNING = ("lan0", "up0", "default", PLAN.slot(0).tap)
_INTERNET = NetworkPolicy(internet=True)

_MBIT = 8
_BYTES = 3 << 20
_AT_LEAST_S = 1.5
"""How long so much takes at that bandwidth: 3.1 s, but that a burst of a second's goes at once."""
_AT_MOST_S = 60.0


@pytest.fixture(scope="module")
def outer() -> Iterator[Outside]:
    with outside(2) as made:
        yield made


class Walled:
    """The host's walls; guest 1 may reach everything that there is to allow."""

    def __init__(self, outer: Outside) -> None:
        self.outer = outer
        self.walls = Walls(PLAN)
        self.walls.listen_at(PORT)
        self.mark = 0

    def put(
        self,
        *rules: str,
        held: bool = False,
        lease: str = "sb-0",
        bandwidth_mbit: int | None = None,
    ) -> Wall:
        made = replace(wall(0, *rules, held=held, lease=lease), bandwidth_mbit=bandwidth_mbit)
        all_ = [made, wall(1, "internet", "host")]
        self.outer.host.run(lambda: self.walls.put(all_))
        self.mark = made.mark
        return made

    def take(self) -> None:
        self.outer.host.run(lambda: self.walls.take(PLAN.slot(index).tap for index in range(2)))

    def open_for(self, seconds: int, *openings: Opening) -> None:
        self.outer.host.run(lambda: self.walls.open_for(openings, seconds, self.mark))

    def refusals(self, of: Wall) -> Refusals:
        return self.outer.host.run(lambda: self.walls.refusals(of))

    def try_(self, cell: str, protocol: str, family: int) -> str:
        addresses, port = CELLS[cell]
        return self.outer.try_(0, protocol, addresses[family], port)


def wall(index: int, *rules: str, held: bool = False, lease: str = "") -> Wall:
    policy = parse_policy(list(rules))
    assert policy is not None
    return Wall(lease or f"sb-{index}", PLAN.slot(index), policy, held)


@pytest.fixture
def walled(outer: Outside) -> Iterator[Walled]:
    made = Walled(outer)
    yield made
    made.take()
    assert outer.host.run(lambda: nftables.read("list tables"))[1:] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("rules", REACHED, ids=" ".join)
def test_a_policy_reaches_what_it_says_and_all_else_is_refused_at_once(
    walled: Walled, rules: tuple[str, ...], protocol: str, family: str
) -> None:
    walled.put(*rules)
    found = walled.outer.try_all(protocol, FAMILIES[family])

    assert found == expected(rules, protocol, family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_an_address_of_a_name_is_open_at_its_port_from_when_it_was_resolved(
    walled: Walled, protocol: str, family: str
) -> None:
    walled.put("example.com:443")
    cells = ("public", "other port", "other address")
    before = [walled.try_(cell, protocol, FAMILIES[family]) for cell in cells]

    address = world.ip(world.PUBLIC[FAMILIES[family]])
    walled.open_for(60, Opening(PLAN.slot(0).tap, address, Protocol(protocol), 443))

    after = [walled.try_(cell, protocol, FAMILIES[family]) for cell in cells]
    assert (before, after) == (["refused"] * 3, ["reached", "refused", "refused"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_name_without_ports_opens_all_of_its_address(
    walled: Walled, protocol: str, family: str
) -> None:
    walled.put("example.com")
    address = world.ip(world.PUBLIC[FAMILIES[family]])

    walled.open_for(60, *(Opening(PLAN.slot(0).tap, address, each, None) for each in Protocol))

    found = [walled.try_(cell, protocol, FAMILIES[family]) for cell in ("other port", "DoT")]
    assert found == ["reached", "refused"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_longer_time_holds_and_a_shorter_one_does_not_cut_it(walled: Walled, family: str) -> None:
    walled.put("example.com:443")
    opening = Opening(PLAN.slot(0).tap, world.ip(world.PUBLIC[FAMILIES[family]]), Protocol.TCP, 443)
    listed = f"list set inet {_TABLE} named{opening.address.version}"

    for seconds, least in ((60, 50), (600, 500), (60, 500)):
        walled.open_for(seconds, opening)
        found = walled.outer.host.run(lambda: nftables.read(listed))
        (element,) = found[1]["set"]["elem"]
        assert element["elem"]["expires"] > least


def test_a_sandbox_has_so_many_addresses_open_and_no_more(
    walled: Walled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walls_, "OPENINGS_MAX", 2)
    walled.put("example.com:443")
    tap = PLAN.slot(0).tap
    openings = [Opening(tap, world.ip(f"203.0.113.{n}"), Protocol.TCP, 443) for n in range(3)]

    walled.open_for(60, *openings[:2])
    with pytest.raises(CapacityError):
        walled.open_for(60, openings[2])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_held_egress_reaches_nothing_until_it_is_released(
    walled: Walled, protocol: str, family: str
) -> None:
    walled.put("internet", "host", held=True)
    held = set(walled.outer.try_all(protocol, FAMILIES[family]).values())

    walled.put("internet", "host")

    assert held == {"refused"}
    assert walled.try_("public", protocol, FAMILIES[family]) == "reached"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("source", ["a sibling's", "the world's"])
def test_packets_with_an_address_that_is_not_its_own_are_dropped(
    walled: Walled, source: str, family: str
) -> None:
    walled.put("internet")
    spoofed = (SIBLING if source == "a sibling's" else world.OTHER)[FAMILIES[family]]
    guest = walled.outer.guests[0]
    guest.address("lo", f"{spoofed}/{world.ip(spoofed).max_prefixlen}")
    to = world.PUBLIC[FAMILIES[family]]
    with walled.outer.world.run(lambda: world.listening(to, 9_000, socket.SOCK_DGRAM)) as arrived:
        guest.run(lambda: world.send(spoofed, to, 9_000, b"spoofed"))
        guest.run(lambda: world.send(None, to, 9_000, b"its own"))

        assert arrived.recv(64) == b"its own"  # what came first was sent last


@pytest.mark.parametrize("family", FAMILIES)
def test_a_connection_ends_when_the_policy_that_allowed_it_does_and_not_before(
    walled: Walled, family: str
) -> None:
    address = world.PUBLIC[FAMILIES[family]]
    server = walled.outer.world.run(lambda: world.listening(address, 9_000))
    walled.put("internet")
    client = walled.outer.guests[0].run(lambda: world.connected(address, 9_000))
    with server, client, server.accept()[0] as accepted:
        walled.put("internet")  # the same again
        client.send(b"1")
        assert accepted.recv(8) == b"1"

        walled.put("192.0.2.0/24")
        client.send(b"2")

        with pytest.raises(ConnectionResetError):
            client.recv(8)


def test_what_was_refused_is_counted_and_listed_for_that_sandbox_alone(walled: Walled) -> None:
    mine, other = walled.put("deny-all"), wall(1, "internet", "host")
    for _ in range(3):
        walled.try_("private", "tcp", 0)
    walled.try_("metadata", "udp", 1)
    walled.try_("public", "icmp", 0)

    found, others = walled.refusals(mine), walled.refusals(other)

    listed = [(each.address, each.protocol, each.port, each.packets) for each in found.destinations]
    assert listed[0] == (world.PRIVATE[0], "tcp", 443, 3)
    # Connections of earlier tests may send something late, elsewhere.
    assert set(listed[1:]) >= {
        (world.METADATA[1], "udp", 80, 1),
        (world.PUBLIC[0], "icmp", None, 1),
    }
    assert found.packets == sum(packets for *_, packets in listed)
    assert others == Refusals()


def test_the_next_sandbox_of_a_link_sees_nothing_of_the_last(walled: Walled) -> None:
    first = walled.put("deny-all", lease="sb-first")
    walled.try_("private", "tcp", 0)
    address = str(CELLS["private"][0][0])
    assert address in {each.address for each in walled.refusals(first).destinations}
    walled.outer.host.run(lambda: walled.walls.take([PLAN.slot(0).tap]))

    second = walled.put("deny-all", lease="sb-second")

    # Connections of earlier tests may send something late, but not there.
    assert address not in {each.address for each in walled.refusals(second).destinations}


def test_a_sandbox_that_tries_many_places_does_not_fill_the_list_of_others(walled: Walled) -> None:
    mine = walled.put("deny-all")

    walled.outer.guests[0].run(lambda: world.knock(world.PUBLIC[0], range(1, 200)))

    found = walled.refusals(mine)
    assert found.packets >= 199, "each once, and again where the refusal was late"
    assert len(found.destinations) < 100


def test_a_sandbox_has_so_many_connections_and_no_more(
    outer: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"over {NETWORK_CONNECTIONS_MAX}" in rules_.build(PLAN, PORT)
    monkeypatch.setattr(rules_, "NETWORK_CONNECTIONS_MAX", 2)
    walled = Walled(outer)
    walled.put("internet")
    try:
        guest, other = outer.guests
        with (
            outer.world.run(lambda: world.listening(world.PUBLIC[0], 9_000)),
            guest.run(_connect),
            guest.run(_connect),
            other.run(_connect),  # which has its own
            pytest.raises(ConnectionRefusedError),
        ):
            guest.run(_connect)
    finally:
        walled.take()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_limited_bandwidth_holds_each_way_and_for_that_sandbox_alone(
    walled: Walled, way: str, family: str
) -> None:
    made = walled.put("internet", "host", bandwidth_mbit=_MBIT)
    other = _transfer_s(walled, 1, way, FAMILIES[family])

    limited = _transfer_s(walled, 0, way, FAMILIES[family])

    assert limited > _AT_LEAST_S
    walled.outer.host.run(lambda: walled.walls.limit(replace(made, bandwidth_mbit=None)))
    assert min(other, _transfer_s(walled, 0, way, FAMILIES[family])) < _AT_LEAST_S


def test_another_bandwidth_leaves_open_what_names_opened_and_connections_as_they_are(
    walled: Walled,
) -> None:
    made = walled.put("example.com:443", bandwidth_mbit=_MBIT)
    walled.open_for(60, Opening(PLAN.slot(0).tap, world.ip(world.PUBLIC[0]), Protocol.TCP, 443))
    listed = f"list limits table inet {_TABLE}"

    walled.outer.host.run(lambda: walled.walls.limit(replace(made, bandwidth_mbit=2 * _MBIT)))

    found = walled.outer.host.run(lambda: nftables.read(listed))
    rates = {each["limit"]["name"]: each["limit"]["rate"] for each in found if "limit" in each}
    tap = PLAN.slot(0).tap
    assert rates == dict.fromkeys((f"{tap}_up", f"{tap}_down"), 2 * _MBIT * 125_000)
    assert walled.try_("public", "tcp", 0) == "reached"
    walled.put("example.com:443")
    assert walled.outer.host.run(lambda: nftables.read(listed))[1:] == []


def test_a_new_daemon_keeps_the_walls_of_what_runs_and_removes_what_is_left(outer: Outside) -> None:
    first = Walled(outer)
    first.put("203.0.113.0/24")
    second = Walls(PLAN)
    second.listen_at(PORT)

    outer.host.run(lambda: second.begin([wall(0, "203.0.113.0/24", lease="sb-0")]))

    try:
        assert first.try_("public", "tcp", 0) == "reached"
        assert first.try_("private", "tcp", 0) == "refused"
    finally:
        third = Walls(PLAN)
        outer.host.run(lambda: third.begin([]))
    assert outer.host.run(lambda: nftables.read("list tables"))[1:] == []


def test_a_host_forwards_for_sandboxes_and_for_no_others(walled: Walled) -> None:
    host, outer = walled.outer.host, walled.outer
    with Namespace() as lan, contextlib.ExitStack() as links:
        host.link("lan0", lan, "eth0")
        links.callback(host.remove, "lan0")  # the kernel takes its time with a namespace's links
        host.address("lan0", "192.0.2.129/25")
        lan.address("eth0", "192.0.2.130/25")
        host.sysctl("ipv4/conf/lan0/forwarding", "0")
        assert _forwards(host, "up0") == "0"
        walled.put("internet")
        assert _forwards(host, "up0") == _forwards(host, "lan0") == "1"
        outer.world.route("192.0.2.128/25", "198.51.100.1")

        with lan.run(lambda: world.listening("192.0.2.130", 9_000, socket.SOCK_DGRAM)) as arrived:
            for sender, data in ((outer.world, b"a stranger's"), (host, b"the host's")):
                sender.run(lambda d=data: world.send(None, "192.0.2.130", 9_000, d))  # type: ignore[misc]
            outer.guests[0].run(lambda: world.send(None, "192.0.2.130", 9_000, b"a sandbox's"))

            assert arrived.recv(64) == b"the host's"
            assert arrived.recv(64) == b"a sandbox's"
        walled.take()
        assert _forwards(host, "up0") == _forwards(host, "lan0") == "0"


@pytest.mark.parametrize("family", FAMILIES)
def test_questions_reach_the_resolver_on_the_own_link_alone(walled: Walled, family: str) -> None:
    host, world_, number = walled.outer.host, walled.outer.world, FAMILIES[family]
    with serving(host, [(LINK[number], PORT)]):
        walled.put("deny-all")
        for protocol in ("tcp", "udp"):
            assert walled.outer.try_(0, protocol, LINK[number], 53) == "reached"
            assert walled.outer.try_(0, protocol, world.PUBLIC[number], 53) == "refused"
            assert walled.outer.try_(0, protocol, SIBLINGS_LINK[number], 53) == "refused"

    outside_ = world.HOST_OUTSIDE[number]
    with host.run(lambda: world.listening(outside_, PORT, socket.SOCK_DGRAM)) as resolver:
        world_.run(lambda: world.send(None, outside_, PORT, b"a stranger's"))
        walled.take()
        world_.run(lambda: world.send(None, outside_, PORT, b"without walls"))

        assert resolver.recv(64) == b"without walls"


@pytest.mark.parametrize("rules", [("deny-all",), ("203.0.113.0/24",)], ids=" ".join)
def test_neighbours_are_looked_for_on_the_own_link_alone(
    walled: Walled, rules: tuple[str, ...]
) -> None:
    walled.put(*rules)
    guest = walled.outer.guests[0]

    elsewhere = (world.PUBLIC[1], SIBLINGS_LINK[1])
    found = [guest.run(partial(world.solicit, each)) for each in elsewhere]

    assert found == ["refused", "refused"]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_passes_by_a_guarded_link_and_forwarding_ends_with_the_last_wall(
    outer: Outside, family: str
) -> None:
    walls, host, address = Walls(PLAN), outer.host, LINK[FAMILIES[family]]
    guest, tap = outer.guests[0], PLAN.slot(0).tap
    with host.run(lambda: world.listening(address, 9_000, socket.SOCK_DGRAM)) as heard:
        host.run(lambda: walls.guard([tap]))
        guest.run(lambda: world.send(None, address, 9_000, b"before there is a wall"))
        host.run(lambda: walls.put([wall(1, "internet")]))
        assert _forwards(host, "up0") == "1"
        guest.run(lambda: world.send(None, address, 9_000, b"beside a wall"))

        host.run(lambda: walls.take([PLAN.slot(1).tap]))

        assert _forwards(host, "up0") == "0"
        assert host.run(_noted) == []
        guest.run(lambda: world.send(None, address, 9_000, b"after the last wall"))
        host.run(lambda: walls.put([wall(1, "internet")]))
        assert _forwards(host, "up0") == "1"
        host.run(lambda: walls.take([PLAN.slot(1).tap]))
        assert _forwards(host, "up0") == "0"
        host.run(lambda: walls.put([wall(0, "host")]))
        guest.run(lambda: world.send(None, address, 9_000, b"by its wall"))
        assert heard.recv(64) == b"by its wall"
    host.run(lambda: walls.take([tap]))
    assert host.run(lambda: nftables.read("list tables"))[1:] == []


def test_the_last_wall_beside_a_guarded_link_can_be_taken_again_if_the_kernel_refused(
    outer: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise HostError("as asked")

    walls, host, tap = Walls(PLAN), outer.host, PLAN.slot(1).tap
    host.run(lambda: walls.guard([PLAN.slot(0).tap]))
    host.run(lambda: walls.put([wall(1, "internet")]))
    monkeypatch.setattr(netlink, "forward", refuse)
    with pytest.raises(HostError, match="as asked"):
        host.run(lambda: walls.take([tap]))
    monkeypatch.undo()
    host.run(lambda: walls.take([tap]))

    assert (_forwards(host, "up0"), host.run(_noted)) == ("0", [])
    host.run(lambda: walls.take([PLAN.slot(0).tap]))


def test_a_policy_without_ipv6_leaves_a_host_as_it_is(outer: Outside) -> None:
    walls = Walls(PLAN)
    for made in (wall(0, "203.0.113.0/24"), Wall("sb-0", PLAN.slot(0).only_v4(), _INTERNET)):
        outer.host.run(partial(walls.put, [made]))
        assert outer.host.setting("ipv6/conf/all/forwarding") == "0"
    outer.host.run(lambda: walls.take([PLAN.slot(0).tap]))


@pytest.mark.parametrize("by", ["the same daemon", "the next"])
def test_a_host_forwards_ipv6_for_sandboxes_alone_and_keeps_its_own_router(
    walled: Walled, by: str
) -> None:
    host, outer = walled.outer.host, walled.outer
    for setting in ("accept_dad", "addr_gen_mode"):
        outer.host.sysctl(f"ipv6/conf/default/{setting}", "0")
    with Namespace() as lan, contextlib.ExitStack() as links:
        lan.sysctl("ipv6/conf/default/accept_dad", "0")
        host.link("lan0", lan, "eth0")
        links.callback(host.remove, "lan0")
        host.address("lan0", "2001:db8:5::1/64")
        lan.address("eth0", "2001:db8:5::2/64", f"{world.ROUTER}/64")
        outer.world.route("2001:db8:5::/64", "2001:db8:ffff::1")
        lan.run(lambda: world.advertise("eth0", "2001:db8:6::"))
        _until_heard(lan, host, "2001:db8:5::1")
        assert host.learned_routers() == ["lan0"], "it believes routers there"

        walled.put("internet")

        assert host.setting("ipv6/conf/all/forwarding") == "1"
        assert host.learned_routers() == ["lan0"]
        settings = [host.setting(f"ipv6/conf/{each}/accept_ra") for each in _LEARNING]
        assert settings == ["2", "2", "2", "0"]
        with lan.run(lambda: world.listening("2001:db8:5::2", 9_000, socket.SOCK_DGRAM)) as arrived:
            for sender, data in ((outer.world, b"a stranger's"), (host, b"the host's")):
                sender.run(lambda d=data: world.send(None, "2001:db8:5::2", 9_000, d))  # type: ignore[misc]
            outer.guests[0].run(lambda: world.send(None, "2001:db8:5::2", 9_000, b"a sandbox's"))
            assert arrived.recv(64) == b"the host's"
            assert arrived.recv(64) == b"a sandbox's"

        if by == "the next":
            host.run(lambda: Walls(PLAN).begin([]))
        walled.take()
        assert host.setting("ipv6/conf/all/forwarding") == "0"
        assert host.learned_routers() == ["lan0"]
        settings = [host.setting(f"ipv6/conf/{each}/accept_ra") for each in _LEARNING]
        assert settings == ["1", "1", "1", "0"]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_another_daemon_allows_is_not_dropped_as_a_strangers(
    outer: Outside, family: str
) -> None:
    first, second = Walls(PLAN), Walls(Plan(PLAN.pool, tap_prefix="fkv"))
    address = world.PUBLIC[FAMILIES[family]]
    try:
        outer.host.run(lambda: first.put([wall(0, "internet")]))
        outer.host.run(lambda: second.put([wall(1, "internet")]))

        assert [outer.try_(guest, "tcp", address, 443) for guest in (0, 1)] == ["reached"] * 2
    finally:
        for walls, index in ((second, 1), (first, 0)):
            outer.host.run(partial(walls.take, [PLAN.slot(index).tap]))


def test_a_host_that_forwards_ipv6_by_itself_goes_on_doing_so(walled: Walled) -> None:
    host = walled.outer.host
    host.sysctl("ipv6/conf/all/forwarding", "1")
    try:
        walled.put("internet")
        assert host.setting("ipv6/conf/up0/accept_ra") == "1"
        assert walled.try_("public", "tcp", FAMILIES["IPv6"]) == "reached"
        walled.take()
        assert host.setting("ipv6/conf/all/forwarding") == "1"
    finally:
        host.sysctl("ipv6/conf/all/forwarding", "0")


def _until_heard(sender: Namespace, host: Namespace, address: str) -> None:
    """Return when the host has taken all that was sent to it by one link before."""
    with host.run(lambda: world.listening(address, 9_001, socket.SOCK_DGRAM)) as heard:
        sender.run(lambda: world.send(None, address, 9_001, b"after that"))
        assert heard.recv(64) == b"after that"


def _transfer_s(walled: Walled, guest: int, way: str, family: int) -> float:
    """Send `_BYTES` between the world and a guest; return how long that took."""
    address = world.PUBLIC[family]
    server = walled.outer.world.run(lambda: world.listening(address, 9_002))
    with server, walled.outer.guests[guest].run(partial(world.connected, address, 9_002)) as client:
        accepted, _ = server.accept()
        with accepted:
            for each in (client, accepted):
                each.settimeout(_AT_MOST_S)
            sender, receiver = (client, accepted) if way == "up" else (accepted, client)
            with ThreadPoolExecutor(1) as pool:
                taken = pool.submit(world.swallow, receiver)
                sender.sendall(bytes(_BYTES))
                sender.shutdown(socket.SHUT_WR)
                return taken.result()


def _connect() -> socket.socket:
    return world.connected(world.PUBLIC[0], 9_000)


def _noted() -> list[str]:
    """Return which of the sets have elements that say what forwards because of us."""
    found = [
        nftables.read(f"list set inet {rules_.table_name(PLAN)} {name}")
        for name in rules_.ROUSED_SETS
    ]
    return [
        each["set"]["name"] for items in found for each in items if each.get("set", {}).get("elem")
    ]


def _forwards(host: Namespace, link: str) -> str:
    path = Path("/proc/sys/net/ipv4/conf", link, "forwarding")
    return host.run(lambda: path.read_text().strip())


_TABLE = rules_.table_name(PLAN)


def test_no_rule_has_the_kernel_swap_more_bytes_than_there_are() -> None:
    table = rules_.build(Plan(), PORT, PORT + 1)
    with Namespace() as apart:
        done = apart.run(
            lambda: subprocess.run(
                ["nft", "--debug=netlink", "--check", "--file", "-"],  # noqa: S607 - a need of ours
                input=table, capture_output=True, text=True, check=True,
            )
        )  # fmt: skip

    swapped = re.findall(r"byteorder reg \d+ = hton\(reg \d+, (\d+), (\d+)\)", done.stdout)
    assert swapped, "nft says nothing of what it asks the kernel"
    assert all(int(of) % int(bytes_) == 0 for bytes_, of in swapped)
