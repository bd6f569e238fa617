"""Say how often a test repeats what must hold every time: a few times, or with `--soak` in full.

A property such as "no kill tears a snapshot" has no natural end.  Every run of the suite tries it
a few times; `make soak` tries it as often as the specification promises.  A test that repeats
itself is marked `soak` and asks the fixture of that name how often; what it checks is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

SOAK_TIMEOUT_S = 5400
"""Deadline of one test with `--soak`, whatever it says of itself."""


@dataclass(frozen=True, slots=True)
class Soak:
    """Whether to repeat in full."""

    in_full: bool

    def count(self, few: int, full: int) -> int:
        """Return how often to repeat."""
        return full if self.in_full else few


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption("--soak", action="store_true", help="repeat in full what repeats")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: repeats itself, and more often with --soak")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--soak"):
        return
    for item in items:
        if item.get_closest_marker("soak") is not None:
            item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT_S), append=False)


@pytest.fixture(scope="session")
def soak(pytestconfig: pytest.Config) -> Soak:
    """How often to repeat."""
    return Soak(pytestconfig.getoption("--soak"))
