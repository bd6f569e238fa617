"""What things cost."""

import pytest
from shop import total


def test_nothing_costs_nothing():
    assert total([], []) == 0


@pytest.mark.parametrize(("amounts", "cost"), [([1, 0], 2.5), ([2, 1], 9.0)])
def test_each_piece_has_its_price(amounts, cost):
    assert total([2.5, 4.0], amounts) == cost
