"""Every sandbox gets a link of its own, and everything follows from its index."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest

from forkd.errors import CapacityError
from forkd.network.plan import PREFIX_LENGTH, Plan

PLAN = Plan()


def test_the_first_and_the_last_link_lie_in_the_pool() -> None:
    first, last = PLAN.slot(0), PLAN.slot(PLAN.slots - 1)

    assert (first.tap, first.host, first.guest) == ("fk0000", "10.200.0.1", "10.200.0.2")
    assert (last.tap, last.host, last.guest) == ("fk3fff", "10.200.255.253", "10.200.255.254")


def test_no_two_links_share_anything() -> None:
    slots = [PLAN.slot(index) for index in range(PLAN.slots)]

    for member in ("tap", "mac", "host", "guest", "host_v6", "guest_v6"):
        assert len({getattr(slot, member) for slot in slots}) == PLAN.slots


def test_a_link_that_took_over_addresses_keeps_its_tap() -> None:
    own, other = PLAN.slot(5), PLAN.slot(3)

    mixed = PLAN.slot(3, tap_index=5)

    assert (mixed.guest, mixed.mac) == (other.guest, other.mac)
    assert (mixed.tap, mixed.index, mixed.tap_index) == (own.tap, 3, 5)


def test_both_ends_of_a_link_are_hosts_of_its_network() -> None:
    slot = PLAN.slot(77)
    network = IPv4Network(f"{slot.guest}/{PREFIX_LENGTH}", strict=False)

    assert set(network.hosts()) == {IPv4Address(slot.host), IPv4Address(slot.guest)}


def test_free_links_are_the_lowest_that_nobody_has() -> None:
    assert PLAN.free(3, {0, 2}) == (1, 3, 4)


def test_one_link_more_than_there_are_is_refused() -> None:
    small = Plan(pool=IPv4Network("10.0.0.0/28"))

    assert small.free(4, set()) == (0, 1, 2, 3)
    with pytest.raises(CapacityError):
        small.free(4, {1})


@pytest.mark.parametrize(
    ("name", "ours"),
    [("fk0000", True), ("fk3fff", True), ("fk", False), ("fk00000", False), ("fkzzzz", False),
     ("eth0", False), ("lo", False), ("0000", False)],
)  # fmt: skip
def test_only_names_that_the_plan_gives_are_ours(name: str, *, ours: bool) -> None:
    assert PLAN.is_ours(name) is ours
