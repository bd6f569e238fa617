"""Outputs are kept to a limit of their own and to one for all, and what is missing is said."""

from __future__ import annotations

import pytest

from forkd.model.output import PIECE_BYTES, Kept, OutputBudget
from tests.support.callers import CALLER, tenant


def test_output_is_kept_to_its_limit_and_what_came_after_is_said_to_be_missing() -> None:
    kept = Kept(bytes_max=4)

    kept.add(b"ab")
    kept.add(b"cd")
    assert (kept.text(), kept.truncated) == ("abcd", False)

    kept.add(b"e")
    assert (kept.text(), kept.truncated) == ("abcd", True)


def test_all_outputs_share_a_budget_and_give_back_what_they_had() -> None:
    budget = OutputBudget(10)

    with budget.keep(CALLER, 8) as first:
        first.add(b"x" * 7)
        with budget.keep(CALLER, 8) as second:
            second.add(b"abcd")
            assert (second.text(), second.truncated, budget.free_bytes) == ("abc", True, 0)
        assert budget.free_bytes == 3
    assert budget.free_bytes == 10


def test_what_was_cut_stays_cut_when_there_is_room_again() -> None:
    """A hole in the middle would look like output that the program never wrote."""
    budget = OutputBudget(4)
    with budget.keep(CALLER, 8) as kept:
        with budget.keep(CALLER, 8) as other:
            other.add(b"xxxx")
            kept.add(b"lost")

        kept.add(b"more")

        assert (kept.text(), kept.truncated) == ("", True)


@pytest.mark.parametrize("shift", range(4))
def test_text_that_comes_in_pieces_is_the_same_wherever_it_is_cut(shift: int) -> None:
    data = b"x" * (PIECE_BYTES - shift) + "é€😀".encode() + b"\xff\xe2\x82" + b"y" * PIECE_BYTES
    kept = Kept(len(data))

    kept.add(data)

    assert kept.text() == data.decode(errors="replace")


def test_a_tenants_outputs_leave_half_of_the_budget_to_others() -> None:
    budget = OutputBudget(100)
    with budget.keep(tenant("red"), 80) as red, budget.keep(tenant("blue"), 80) as blue:
        red.add(b"x" * 80)
        blue.add(b"x" * 20)

        assert (len(red), red.truncated) == (50, True)
        assert (len(blue), blue.truncated) == (20, False)
    assert budget.free_bytes == 100
