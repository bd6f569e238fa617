"""What is in the basket; each test expects to be the first, so it needs a fork of its own."""

import pytest
from shop import put


@pytest.mark.parametrize("name", ["apple", "bread", "cheese"])
def test_the_basket_is_empty_at_first(name):
    assert put(name) == 1
