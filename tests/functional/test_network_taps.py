"""Links are made with the host's address, found when left over, and removed."""

from __future__ import annotations

import errno
import socket
from ipaddress import IPv4Network, IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyroute2 import IPRoute

from forkd.errors import HostError
from forkd.host import netlink
from forkd.host.netlink import Ends, Link
from forkd.network import taps
from forkd.network.plan import PREFIX_LENGTH, PREFIX_LENGTH_V6, Plan
from tests.support.namespaces import Namespace
from tests.support.outside import ROUTER, advertise, listening, send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.network.plan import Slot

pytestmark = pytest.mark.needs("root", "tun")

_PERMANENT = 0x80

PLAN = Plan(pool=IPv4Network("10.213.0.0/24"), tap_prefix="fktest")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    taps.remove(map(PLAN.slot, range(3)))


def test_a_link_has_the_hosts_addresses_as_soon_as_it_is_made() -> None:
    slot = PLAN.slot(0)

    taps.create([slot])

    assert [is_ours(slot.host), is_ours(slot.host_v6)] == [True, True]
    assert IPv4Network((slot.host, PREFIX_LENGTH), strict=False) in netlink.routes()
    assert slot.tap in {name for _, name in socket.if_nameindex()}


def test_a_link_without_ipv6_has_none() -> None:
    slot = PLAN.slot(0).only_v4()

    taps.create([slot])

    assert [is_ours(slot.host), is_ours(slot.host_v6)] == [True, False]
    assert Path("/proc/sys/net/ipv6/conf", slot.tap, "disable_ipv6").read_text().strip() == "1"
    assert slot.tap not in Path("/proc/net/if_inet6").read_text()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ipv6/conf/{}/accept_ra", "0"),
        ("ipv6/conf/{}/autoconf", "0"),
        ("ipv6/conf/{}/accept_redirects", "0"),
        ("ipv6/conf/{}/forwarding", "0"),
        ("ipv6/conf/{}/addr_gen_mode", "1"),
        ("ipv4/conf/{}/forwarding", "0"),
        ("ipv4/conf/{}/rp_filter", "1"),
        ("ipv4/conf/{}/accept_redirects", "0"),
    ],
)
def test_the_host_learns_nothing_from_a_link_and_forwards_nothing(setting: str, value: str) -> None:
    slot = PLAN.slot(0)

    taps.create([slot])

    assert Path("/proc/sys/net", setting.format(slot.tap)).read_text().strip() == value


def test_a_link_has_no_ipv6_address_but_the_one_it_was_given() -> None:
    slot = PLAN.slot(0)

    taps.create([slot])

    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    found = [int(address, 16) for address, *_, name in lines if name == slot.tap]
    assert found == [int(IPv6Address(slot.host_v6))]


@pytest.mark.parametrize("isolated", [False, True], ids=["a link of any kind", "a sandbox's link"])
def test_a_guest_that_advertises_itself_as_a_router_is_not_believed(*, isolated: bool) -> None:
    slot = PLAN.slot(0)
    with Namespace() as host, Namespace() as guest:
        for end in (host, guest):
            end.sysctl("ipv6/conf/default/accept_dad", "0")
        host.link(slot.tap, guest, "eth0", mac=slot.mac)
        if isolated:
            host.run(lambda: taps.prepare(slot))
        else:
            host.address(slot.tap, f"{slot.host_v6}/{PREFIX_LENGTH_V6}")
        guest.address("eth0", f"{slot.guest_v6}/{PREFIX_LENGTH_V6}", f"{ROUTER}/64")
        with host.run(lambda: listening(slot.host_v6, 9_000, socket.SOCK_DGRAM)) as heard:
            guest.run(lambda: advertise("eth0", "2001:db8:bad::"))
            guest.run(lambda: send(None, slot.host_v6, 9_000, b"after that"))
            assert heard.recv(64) == b"after that"

        found = host.run(lambda: Path("/proc/thread-self/net/if_inet6").read_text())

        assert host.learned_routers() == ([] if isolated else [slot.tap])
        assert ("20010db80bad" in found) is not isolated


def test_the_host_need_not_ask_a_guest_where_its_ipv6_address_is() -> None:
    slot = PLAN.slot(0)

    taps.create([slot])

    with IPRoute() as route:
        index = route.link_lookup(ifname=slot.tap)[0]
        found = [
            (each.get_attr("NDA_DST"), each.get_attr("NDA_LLADDR"), each["state"])
            for each in route.get_neighbours(family=socket.AF_INET6, ifindex=index)
        ]
    assert (slot.guest_v6, slot.mac, _PERMANENT) in found


def test_a_link_takes_over_the_addresses_of_one_that_is_gone_and_may_do_so_twice() -> None:
    old, gone = PLAN.slot(0), PLAN.slot(1)
    taps.create([old, gone])
    taps.remove([gone])
    slot = PLAN.slot(1, tap_index=0)

    taps.readdress(slot)
    taps.readdress(slot)

    assert [is_ours(gone.host), is_ours(gone.host_v6)] == [True, True]
    assert [is_ours(old.host), is_ours(old.host_v6)] == [False, False]


def test_a_removed_link_is_gone_and_removing_it_again_is_fine() -> None:
    slot = PLAN.slot(0)
    taps.create([slot])

    taps.remove([slot])
    taps.remove([slot])

    assert slot.tap not in {name for _, name in socket.if_nameindex()}


def test_a_link_that_cannot_be_set_up_is_not_left_behind() -> None:
    first = PLAN.slot(0)
    taps.create([first])
    same_again = PLAN.slot(0)

    failed = taps.create([same_again])

    assert isinstance(failed[first.tap], HostError)
    assert first.tap not in {name for _, name in socket.if_nameindex()}


def link_of(slot: Slot) -> Link:
    return Link(slot.tap, slot.mac, (Ends(slot.host, slot.guest, PREFIX_LENGTH),))


def is_ours(address: str) -> bool:
    """Whether this host has an address, and may use it at once."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return False
        return True


def test_links_that_nobody_uses_are_found_and_others_links_are_not() -> None:
    used, unused = PLAN.slot(1), PLAN.slot(2)
    taps.create([used, unused])

    assert taps.left_over(PLAN, {used.tap}) == (unused.tap,)


def test_a_link_that_cannot_be_set_up_keeps_none_beside_it_from_it() -> None:
    first, second = PLAN.slot(0), PLAN.slot(1)
    taps.create([first])
    netlink.add_tap(second.tap)

    failed = netlink.set_up([link_of(first), link_of(second)])

    assert {tap: str(error) for tap, error in failed.items()} == {
        first.tap: f"cannot set up {first.tap}: File exists"
    }
    assert is_ours(second.host)


def test_links_are_removed_though_some_of_them_are_gone() -> None:
    slots = [PLAN.slot(index) for index in range(3)]
    taps.create(slots)
    taps.remove(slots[:1])

    taps.remove(slots)

    assert not [name for _, name in socket.if_nameindex() if PLAN.is_ours(name)]
