"""A tenant may have half of what the others leave, and never all."""

from __future__ import annotations

import pytest

from forkd.model.caller import Tenant
from forkd.model.shares import Shares

RED, BLUE, GREEN = Tenant("red"), Tenant("blue"), Tenant("green")


def taken(shares: Shares, tenant: Tenant, *, whole: bool = False) -> int:
    """Return how many of one each a tenant gets that takes all it can."""
    count = 0
    while shares.take(tenant, whole=whole):
        count += 1
    return count


@pytest.mark.parametrize(("most", "each"), [(512, (256, 128, 64)), (4, (2, 1, 1)), (1, (1, 0, 0))])
def test_who_takes_all_it_can_leaves_half_to_the_next(
    most: int, each: tuple[int, int, int]
) -> None:
    shares = Shares(most)

    assert tuple(taken(shares, tenant) for tenant in (RED, BLUE, GREEN)) == each
    assert shares.used == sum(each)


def test_who_needs_no_share_takes_what_is_left() -> None:
    shares = Shares(8)
    assert taken(shares, RED) == 4

    assert taken(shares, BLUE, whole=True) == 4
    assert not shares.take(GREEN, whole=True)


def test_what_is_given_back_can_be_taken_again_by_whoever_has_a_share() -> None:
    shares = Shares(8)
    assert taken(shares, RED) == 4
    shares.give_back(RED, 3)

    assert shares.of(RED) == 1
    assert taken(shares, BLUE) == 4  # half of the seven that red leaves, rounded up
    assert taken(shares, RED) == 1
    shares.give_back(RED, 2)
    shares.give_back(BLUE, 4)
    assert shares.used == 0


def test_much_at_once_is_taken_whole_or_not_at_all() -> None:
    shares = Shares(100)

    assert not shares.take(RED, 51)
    assert shares.room(RED) == 50
    assert shares.take(RED, 50)
    assert not shares.take(RED)
    assert shares.room(BLUE) == 25
