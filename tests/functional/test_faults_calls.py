"""No call that the kernel refuses makes forkd hang, crash, lie, or leave anything behind."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from errno import EIO, EMFILE, ENOSPC, EPERM
from typing import TYPE_CHECKING

import pytest

from tests.support.fault_steps import STEPS
from tests.support.fault_trial import Refusal, refusals_of
from tests.support.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.fault_trial import Laboratory
    from tests.support.soak import Soak

pytestmark = [pytest.mark.timeout(300)]

TRIALS = 20
"""How many faults of all are tried in each run; `--soak` tries every one."""

MISSED_MAX = 0.1
"""Of the calls that were to fail, how many may not have come again: what they wait for differs."""


@dataclass(frozen=True, slots=True)
class Once:
    """Something that has gone wrong once.

    Attributes:
        step: In which step.
        function: What failed.
        number: How.
        under: In which functions of forkd, the last one first.
    """

    step: str
    function: str
    number: int
    under: tuple[str, ...]


ONCE = (
    Once("eval", "socket.socket", EMFILE, ("connected", "connect")),
    Once("fork", "posix.pidfd_open", EMFILE, ("open", "_watch")),
    Once("delete", "posix.pidfd_open", EMFILE, ("open", "stop_machine")),
    Once("branch", "socket.socket", EMFILE, ("connected", "connect", "_leave_to_siblings")),
    Once("fork with a cold zygote", "posix.pipe2", EMFILE, ("start",)),
    Once("fork with a cold zygote", "posix.mkdir", ENOSPC, ("make_folder",)),
    Once("fork with a cold zygote", "posix.open", ENOSPC, ("write_atomic",)),
    Once("fork with a cold zygote", "posix.open", ENOSPC, ("_keep", "start")),
    Once("end of a life", "posix.pidfd_open", EMFILE, ("open", "stop_machine")),
    Once("delete a snapshot", "posix.rename", EIO, ("rename_for_good", "put_aside")),
    Once("compact in place", "posix.fsync", EIO, ("sync_folder", "rename_for_good", "replace")),
    Once("compare", "socket.socket", EMFILE, ("connected", "connect", "_identify")),
    Once("restart", "select.epoll.register", ENOSPC, ("__init__", "_steps", "watch")),
    Once("restart", "sqlite3.Connection.execute", EIO, ("_open_to_read",)),
    Once("build", "posix.killpg", EPERM, ("end", "run")),
)


@pytest.mark.soak
async def test_whatever_call_fails_forkd_says_so_and_is_well_afterwards(
    lab: Laboratory, soak: Soak, tell: Callable[[str], None]
) -> None:
    every = [
        refusal for step in STEPS for refusal in refusals_of(step, (await lab.record(step)).sites)
    ]
    assert lab.injector.undecided == set(), "fault_table.py has to say what these can give"

    problems = await lab.attempt_some(every, soak, TRIALS)

    tell("\n".join([*problems, lab.summary(len(every))]))
    assert problems == []
    assert lab.missed <= MISSED_MAX * lab.tried


async def test_what_has_gone_wrong_once_does_not_again(lab: Laboratory) -> None:
    by_step: dict[str, list[Once]] = defaultdict(list)
    for each in ONCE:
        by_step[each.step].append(each)

    problems = []
    for step, cases in by_step.items():
        sites = (await lab.record(step)).sites
        for case in cases:
            meant = [site for site in sites if site.is_under(case.function, *case.under)]
            assert meant, f"{case} is no longer reached"
            problems += await lab.attempt(Refusal(step, Fault(meant[0], case.number)))

    assert not problems, "\n".join(problems)
    assert lab.missed == 0
