"""No answer of a machine or a guest makes forkd hang, crash, lie, or harm anybody else."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from forkd.engine.replies import MachineExited, Reply
from tests.support.fault_answers import Spoilt, spoilt_of, types_read
from tests.support.fault_steps import STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.fault_trial import Laboratory
    from tests.support.soak import Soak

pytestmark = [pytest.mark.timeout(300)]

STEPS_WITH_PIDS = ("fork", "fork with a cold chain", "branch", "delete")
"""Steps in which machines and zygotes name processes."""

TRIALS = 20
"""How many answers of all are spoilt in each run; `--soak` spoils every one."""

PID_OF_ANOTHER = "pid somebody's"
"""Answers that name a process which has nothing to do with forkd."""

MISSED_MAX = 0.1
"""Of the answers that were to be spoilt, how many may not have been asked for again."""


@pytest.fixture
def decoy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with forkd."""
    with subprocess.Popen(["/bin/sleep", "infinity"]) as process:
        yield process
        process.kill()


@pytest.mark.soak
async def test_whatever_is_answered_forkd_says_so_and_is_well_afterwards(
    lab: Laboratory,
    soak: Soak,
    tell: Callable[[str], None],
    decoy: subprocess.Popen[bytes],
) -> None:
    every, read = list[Spoilt](), set[type[Reply]]()
    for step in STEPS:
        recorded = await lab.record(step)
        every += spoilt_of(step, recorded.said, recorded.readings, decoy.pid)
        read |= types_read(recorded.readings.found)
    # A machine that ends may be seen to before what it says of that is read.
    unread = set(Reply.__subclasses__()) - read - {MachineExited}
    assert unread == set(), "no step has anything answer with these"
    soak.dice().shuffle(every)

    problems = []
    for trial in every[: soak.count(TRIALS, len(every))]:
        problems += await lab.attempt(trial)
        if decoy.poll() is not None:
            problems.append(f"{trial}: somebody else's process was killed")
            break

    tell("\n".join([*problems, lab.summary(len(every))]))
    assert problems == []
    assert lab.missed <= MISSED_MAX * lab.tried


async def test_no_process_is_ended_because_a_machine_names_it(
    lab: Laboratory, decoy: subprocess.Popen[bytes]
) -> None:
    trials = list[Spoilt]()
    for step in STEPS_WITH_PIDS:
        recorded = await lab.record(step)
        every = spoilt_of(step, recorded.said, recorded.readings, decoy.pid)
        trials += [each for each in every if each.nonsense.name.endswith(PID_OF_ANOTHER)]

    problems = [problem for trial in trials for problem in await lab.attempt(trial)]

    assert problems == []
    assert decoy.poll() is None
    assert trials != []
