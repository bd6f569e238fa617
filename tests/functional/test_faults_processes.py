"""No process that is killed makes forkd hang, crash, lie, or leave anything behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.fault_processes import deaths_of
from tests.support.fault_steps import STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.fault_trial import Laboratory
    from tests.support.soak import Soak

pytestmark = [pytest.mark.timeout(300)]

TRIALS = 15
"""How many deaths of all are tried in each run; `--soak` tries every one."""

MISSED_MAX = 0.3
"""Of the processes that were to be killed, how many may have ended before, or never begun."""


@pytest.mark.soak
async def test_whichever_process_is_killed_forkd_says_so_and_is_well_afterwards(
    lab: Laboratory, soak: Soak, tell: Callable[[str], None]
) -> None:
    every = []
    for step in STEPS:
        recorded = await lab.record(step)
        every += deaths_of(step, recorded.sites, recorded.processes)

    problems = await lab.attempt_some(every, soak, TRIALS)

    tell("\n".join([*problems, lab.summary(len(every))]))
    assert problems == []
    assert lab.missed <= MISSED_MAX * lab.tried
