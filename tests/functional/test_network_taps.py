"""Links are made with the host's address, found when left over, and removed."""

from __future__ import annotations

import socket
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
from forkd.network import taps
from forkd.network.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "tun")

PLAN = Plan(pool=IPv4Network("10.213.0.0/24"), tap_prefix="fktest")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    for index in range(3):
        taps.remove(PLAN.slot(index))


def test_a_link_has_the_hosts_address_as_soon_as_it_is_made() -> None:
    slot = PLAN.slot(0)

    taps.create(slot)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((slot.host, 0))
    assert slot.tap in {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ipv6/conf/{}/disable_ipv6", "1"),
        ("ipv4/conf/{}/forwarding", "0"),
        ("ipv4/conf/{}/rp_filter", "1"),
        ("ipv4/conf/{}/accept_redirects", "0"),
    ],
)
def test_the_host_learns_nothing_from_a_link_and_forwards_nothing(setting: str, value: str) -> None:
    slot = PLAN.slot(0)

    taps.create(slot)

    path = Path("/proc/sys/net", setting.format(slot.tap))
    assert not path.exists() or path.read_text().strip() == value
    addresses = Path("/proc/net/if_inet6")
    assert not addresses.exists() or slot.tap not in addresses.read_text()


def test_a_link_takes_over_the_address_of_one_that_is_gone_and_may_do_so_twice() -> None:
    old, gone = PLAN.slot(0), PLAN.slot(1)
    taps.create(old)
    taps.create(gone)
    taps.remove(gone)
    slot = PLAN.slot(1, tap_index=0)

    taps.readdress(slot)
    taps.readdress(slot)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((gone.host, 0))
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
        pytest.raises(OSError, match="assign"),
    ):
        sock.bind((old.host, 0))


def test_a_removed_link_is_gone_and_removing_it_again_is_fine() -> None:
    slot = PLAN.slot(0)
    taps.create(slot)

    taps.remove(slot)
    taps.remove(slot)

    assert slot.tap not in {name for _, name in socket.if_nameindex()}


def test_a_link_that_cannot_be_set_up_is_not_left_behind() -> None:
    first = PLAN.slot(0)
    taps.create(first)
    same_again = PLAN.slot(0)

    with pytest.raises(HostError):
        taps.create(same_again)

    assert first.tap not in {name for _, name in socket.if_nameindex()}


def test_links_that_nobody_uses_are_found_and_others_links_are_not() -> None:
    used, unused = PLAN.slot(1), PLAN.slot(2)
    taps.create(used)
    taps.create(unused)

    assert taps.left_over(PLAN, {used.tap}) == (unused.tap,)
