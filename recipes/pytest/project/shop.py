"""A small shop: what the tests of the recipe are about."""

import numpy as np

BASKET = []
"""What was put into the basket: a global, as too many programs have one."""


def total(prices, amounts):
    """Return what so many pieces cost."""
    return float(np.dot(prices, amounts))


def put(name):
    """Put a piece into the basket; return how many are in it."""
    BASKET.append(name)
    return len(BASKET)
