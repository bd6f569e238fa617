"""A connection counts for its address, then for its tenant, then for nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.daemon import visitors as visitors_module
from forkd.daemon.visitors import Visitor, Visitors
from tests.support.callers import CALLER, tenant

if TYPE_CHECKING:
    import pytest


def entered(visitors: Visitors, address: str) -> Visitor:
    visitor = visitors.enter(address)
    assert visitor is not None
    return visitor


def test_one_address_has_so_many_strangers_and_of_ipv6_a_64_is_one_address() -> None:
    visitors = Visitors(connections_max=100, strangers_max=2)
    entered(visitors, "2001:db8::1")
    leaving = entered(visitors, "2001:db8::2")

    assert visitors.enter("2001:db8::3") is None
    entered(visitors, "2001:db8:0:1::1")
    leaving.leave()
    leaving.leave()  # which changes nothing
    entered(visitors, "2001:db8::3")
    assert visitors.enter("2001:db8::4") is None


def test_who_has_shown_a_token_is_no_stranger_and_counts_for_its_tenant() -> None:
    visitors = Visitors(connections_max=4, strangers_max=1)
    red = []
    for _ in range(2):
        red.append(entered(visitors, "10.0.0.1"))
        assert red[-1].show(tenant("red"))
        assert red[-1].show(tenant("red"))  # the next request counts nothing more

    beyond = entered(visitors, "10.0.0.1")
    assert not beyond.show(tenant("red"))
    assert beyond.show(tenant("blue"))
    assert entered(visitors, "10.0.0.1").show(CALLER)
    for each in red:
        each.leave()
    assert entered(visitors, "10.0.0.1").show(tenant("red"))


def test_a_connection_that_shows_another_tenants_token_counts_for_that_one() -> None:
    visitors = Visitors(connections_max=2, strangers_max=2)
    first, second = entered(visitors, "10.0.0.1"), entered(visitors, "10.0.0.1")
    assert first.show(tenant("red"))
    assert first.show(tenant("blue"))

    assert second.show(tenant("red"))


def test_an_address_of_which_a_valid_token_came_may_open_many_connections_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    visitors = Visitors(connections_max=16, strangers_max=2)
    first = entered(visitors, "10.0.0.1")
    assert first.show(CALLER)

    for _ in range(8):
        entered(visitors, "10.0.0.1")
    assert visitors.enter("10.0.0.1") is None
    monkeypatch.setattr(visitors_module, "KNOWN_S", -1.0)
    for _ in range(2):
        entered(visitors, "10.0.0.2").show(CALLER)
    for _ in range(2):
        entered(visitors, "10.0.0.2")
    assert visitors.enter("10.0.0.2") is None
