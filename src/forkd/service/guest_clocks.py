"""Have the clocks of running guests follow the host's when it is set, or was suspended.

A guest's wall clock is set at its fork, and then runs by its monotonic clock, which has nothing to
do with what becomes of the host's.  So after each step every running guest is given the host's
time by its agent, which moves the wall clock alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from forkd.errors import Conflict, ForkdError
from forkd.service.clock import LOOK_EVERY_S
from forkd.service.supervision import TaskKind

if TYPE_CHECKING:
    from forkd.model.ids import SandboxId
    from forkd.service.sandboxes.owner import SandboxOwner
    from forkd.service.sandboxes.roster import Roster
    from forkd.service.supervision import Supervisor

GUESTS_AT_ONCE = 32
"""How many guests are given the time at once."""

ROUNDS = 3
"""How often it is tried: a guest that did not answer is asked again after `LOOK_EVERY_S`, and one
that was being forked during the step is there by then."""

log = logging.getLogger(__name__)


class GuestClocks:
    """The clocks of one host's guests.

    Args:
        tasks: Runs what sets them.
        roster: Which guests there are.
    """

    def __init__(self, tasks: Supervisor, roster: Roster) -> None:
        self._tasks = tasks
        self._roster = roster
        self._at_once = asyncio.Semaphore(GUESTS_AT_ONCE)
        self._one = asyncio.Lock()
        self._newer = asyncio.Event()

    def note_step(self, moved_s: float) -> None:
        """Have every guest follow the host's clock, in the background."""
        self._newer.set()
        self._newer = asyncio.Event()
        with contextlib.suppress(Conflict):  # the service is stopping
            self._tasks.run(TaskKind.CLOCK, self._follow(self._newer), f"moved {moved_s:.3f} s")

    async def _follow(self, newer: asyncio.Event) -> None:
        """Give every guest the time, in `ROUNDS`, unless there is a newer step."""
        right: set[SandboxId] = set()
        async with self._one:
            for _ in range(ROUNDS):
                async with asyncio.TaskGroup() as group:
                    for owner in self._roster:
                        if owner.sandbox.id not in right:
                            group.create_task(self._give_time(owner, right))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await newer.wait()
                    return

    async def _give_time(self, owner: SandboxOwner, right: set[SandboxId]) -> None:
        async with self._at_once:
            try:
                moved_s = await owner.running_guest().follow_clock()
            except Conflict:  # it runs no more
                return
            except ForkdError as error:
                about = {"sandbox": owner.sandbox.id, "error": str(error)}
                log.warning("guest's clock not set", extra=about)
                return
            right.add(owner.sandbox.id)
            log.debug("guest's clock set", extra={"sandbox": owner.sandbox.id, "moved_s": moved_s})
