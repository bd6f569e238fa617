"""Attempts of forks in a run on Intel: what is counted, and which run has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]

MODULE = """
import asyncio, pytest
from forkd.engine.control import Control
from forkd.engine.replies import ChildFailed, ChildReady, SpawnStages

MS = SpawnStages(clone=1, build=1, resume=1, agent=1, total=4)


class Zygote(Control):
    def __init__(self, outcomes):
        self.outcomes = outcomes

    async def _fork(self, request, patience_s, on_outcome):
        for each in self.outcomes:
            on_outcome(each)


@pytest.mark.parametrize("attempts", {attempts})
def test_fork(attempts):
    ready = ChildReady(event="ready", id="a", pid=7, ms=MS, attempts=attempts)
    failed = ChildFailed(event="failed", id="b", stage="agent", code="c", message="m", attempts=3)
    heard = []
    asyncio.run(Zygote([ready, failed]).fork([], deadline_s=1.0, on_outcome=heard.append))
    assert heard == [ready, failed]
"""


@pytest.mark.parametrize(
    ("attempts", "status", "story"),
    [
        ([1, 1, 1], pytest.ExitCode.OK, "attempts of 3 children: 3 with 1"),
        ([1, 2, 1], pytest.ExitCode.TESTS_FAILED, "attempts of 3 children: 2 with 1, 1 with 2"),
        ([], pytest.ExitCode.OK, "attempts of 0 children: none"),
    ],
)
def test_a_run_in_which_a_child_was_forked_again_fails_and_says_how_often(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    attempts: list[int],
    status: pytest.ExitCode,
    story: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # none is needed; they load slowly
    pytester.makepyfile(MODULE.replace("{attempts}", repr(attempts)))

    result = pytester.runpytest_subprocess("-p", "tests.intel.attempts")

    assert result.ret == status
    assert story in result.outlines
