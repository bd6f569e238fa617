"""Say how often a test repeats what must hold every time: a few times, or with `--soak` in full.

A property such as "no kill tears a snapshot" has no natural end.  Every run of the suite tries it
a few times; `make soak` tries it as often as the specification promises.  A test that repeats
itself is marked `soak` and asks the fixture of that name how often; what it checks is the same.

`soak(only=True)` marks what runs with `--soak` alone: a long test, or one case of it.  With
`--long` it runs, too, but repeats a few times.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _pytest.mark import ParameterSet

USUAL_DICE = 0
"""The seed of every run, so that what fails is the change's; a soak throws other dice each time."""

SOAK_TIMEOUT_S = 5400
"""Deadline of one test with `--soak`, whatever it says of itself."""


@dataclass(frozen=True, slots=True)
class Soak:
    """Whether to repeat in full, and with which dice.

    Attributes:
        in_full: Whether to repeat in full.
        seed: Of the dice; the same seed throws the same.
    """

    in_full: bool
    seed: int

    def count(self, few: int, full: int) -> int:
        """Return how often to repeat."""
        return full if self.in_full else few

    def dice(self) -> random.Random:
        """Return dice of a test's own, and print the seed that makes them fall again like this."""
        print(f"repeat with --dice {self.seed}")  # noqa: T201 - pytest shows it of a failed test
        return random.Random(self.seed)  # noqa: S311 - a test's


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption("--soak", action="store_true", help="repeat in full what repeats")
    group.addoption(
        "--long", action="store_true", help="run what only --soak runs, too, repeating a few times"
    )
    group.addoption("--dice", type=int, metavar="SEED", help="have random tests do as with SEED")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "soak(only=False): repeats itself, and more often, or only, with --soak"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--soak") and not config.getoption("--long"):
        left_out = [item for item in items if is_soak_only(item)]
        items[:] = [item for item in items if not is_soak_only(item)]
        config.hook.pytest_deselected(items=left_out)
    for item in items if config.getoption("--soak") else ():
        if item.get_closest_marker("soak") is not None:
            item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT_S), append=False)


def only_in_soak(*values: object, marks: Sequence[pytest.MarkDecorator] = ()) -> ParameterSet:
    """Make one case of a test that runs with `--soak` alone, with other marks that it has."""
    return pytest.param(*values, marks=[*marks, pytest.mark.soak(only=True)])


def is_soak_only(item: pytest.Item) -> bool:
    """Tell whether a test, or this case of it, runs with `--soak` alone."""
    return any(mark.kwargs.get("only", False) for mark in item.iter_markers("soak"))


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Say what is seen whatever becomes of the test: its counts and figures."""

    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", end="")  # noqa: T201 - to be seen

    return say


@pytest.fixture(scope="session")
def soak(pytestconfig: pytest.Config) -> Soak:
    """How often to repeat."""
    in_full, seed = pytestconfig.getoption("--soak"), pytestconfig.getoption("--dice")
    if seed is None:
        seed = secrets.randbits(32) if in_full else USUAL_DICE
    return Soak(in_full, seed)
