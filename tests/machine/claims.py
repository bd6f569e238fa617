"""Share the modules of a test run among several machines, each taking the next one when it is free.

    pytest -p tests.machine.claims --claims=FOLDER …

Every machine is given all the tests and a folder that all of them see.  Who makes a module's folder
in there runs that module; the others pass it over.  So they end at about the same time, however
fast each of them is and whenever it began.  What takes longest, by `durations.json`, comes first.
Modules that are marked `together("name")` are claimed as one.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

DURATIONS = Path("tests/machine/durations.json")
"""What each module took when somebody last looked, in seconds; see `tests.machine.durations`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--claims", type=Path, metavar="FOLDER", help="run what is unclaimed")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--claims")
    if folder is not None:
        config.pluginmanager.register(Claims(folder, config.rootpath / DURATIONS))


class Claims:
    """Runs the modules that it is the first to claim."""

    def __init__(self, folder: Path, durations: Path) -> None:
        self._folder = folder
        self._taken_s: dict[str, float] = json.loads(durations.read_text(encoding="utf-8"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put what takes longest, or nobody knows, first; each claim stays in one piece."""
        modules = {module_of(item): claim_of(item) for item in items}
        taken_s: dict[str, float] = defaultdict(float)
        for module, claim in modules.items():
            taken_s[claim] += self._taken_s.get(module, math.inf)
        items.sort(key=lambda item: (-taken_s[claim_of(item)], claim_of(item), module_of(item)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the tests of the modules that are claimed, one by one, as pytest runs all of them."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        ran = set()
        for item, following in pairwise(chain(self._claimed(session.items), (None,))):
            assert item is not None
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            ran.add(item)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        others = [item for item in session.items if item not in ran]
        session.config.hook.pytest_deselected(items=others)
        return True

    def _claimed(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """Yield the tests of each claim that was won, which is tried when its first is due.

        It is due when the last test of the claim before begins, since what that one tears down
        depends on what comes next: fixtures of the whole run stay.
        """
        for claim, tests in groupby(items, claim_of):
            try:
                (self._folder / claim.replace("/", ".")).mkdir()
            except FileExistsError:
                continue
            yield from tests


def claim_of(item: pytest.Item) -> str:
    """Return by which name a test is claimed."""
    mark = item.get_closest_marker("together")
    return module_of(item) if mark is None else str(mark.args[0])


def module_of(item: pytest.Item) -> str:
    """Return the path of a test's module below the root folder."""
    return item.nodeid.partition("::")[0]
