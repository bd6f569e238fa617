"""Pause and resume a sandbox: its vCPUs stop, and its memory stays where it is."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forkd.engine.control import Control
from forkd.errors import Conflict, ForkdError
from forkd.model.event import EventKind
from forkd.model.sandbox import SandboxState
from forkd.service.sandboxes.lifecycle import LifeEvent, check, next_state

if TYPE_CHECKING:
    from forkd.model.sandbox import Sandbox
    from forkd.service.journal import Journal
    from forkd.service.records import Records
    from forkd.service.sandboxes.owner import SandboxOwner

CLOCK_TIMEOUT_S = 5.0
"""How long setting the guest's clock may take after it was paused."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pausing:
    """Pauses sandboxes.

    Attributes:
        records: Where it is written down which are paused.
        journal: Where it is noted.
    """

    records: Records
    journal: Journal

    async def pause(self, owner: SandboxOwner) -> Sandbox:
        """Have a machine's vCPUs stop; idempotent.

        It is written down first: a daemon that is killed between has a sandbox that says that it is
        paused and is not, which `resume` puts right, and never one that hangs and says nothing.

        Raises:
            Conflict: It does not run, or its guest is about to get another identity.
            ForkdError: The machine refused; it runs on.
        """
        async with owner.exclusive("pause") as found:
            check(found, LifeEvent.PAUSE)
            if found.state is SandboxState.PAUSED:
                return found
            if owner.renaming:
                words = f"sandbox {found.id} is still being promoted: pause it later"
                raise Conflict(words, sandbox=found.id)
            paused = replace(found, state=next_state(found.state, LifeEvent.PAUSE))
            await self.records.put([replace(owner.row, sandbox=paused)])
            try:
                async with await Control.connect(owner.control) as control:
                    await control.pause()
            except ForkdError:
                await self._run_on(owner)
                raise
            owner.sandbox = paused
            self.journal.note(EventKind.SANDBOX_PAUSED, paused.id, paused.owner)
            return paused

    async def resume(self, owner: SandboxOwner) -> Sandbox:
        """Have a machine's vCPUs run again, and its guest's clock follow the host's; idempotent.

        Raises:
            Conflict: It has ended.
            ForkdError: The machine refused.
        """
        async with owner.exclusive("resume") as found:
            check(found, LifeEvent.RESUME)
            async with await Control.connect(owner.control) as control:
                await control.resume()
            if found.state is not SandboxState.PAUSED:
                return found
            owner.sandbox = replace(found, state=next_state(found.state, LifeEvent.RESUME))
            self.journal.note(EventKind.SANDBOX_RESUMED, found.id, found.owner)
            await self.records.put([owner.row])
        try:
            async with asyncio.timeout(CLOCK_TIMEOUT_S):
                await owner.guest.follow_clock()
        except (ForkdError, TimeoutError) as error:
            log.warning("guest's clock not set", extra=_about(owner, error))
        return owner.sandbox

    async def _run_on(self, owner: SandboxOwner) -> None:
        """Have a machine run that was to be paused and may be; what fails is logged."""
        try:
            async with await Control.connect(owner.control) as control:
                await control.resume()
            await self.records.put([owner.row])
        except ForkdError as error:
            log.warning("sandbox may be paused", extra=_about(owner, error))


def _about(owner: SandboxOwner, error: Exception) -> dict[str, str]:
    return {"sandbox": owner.sandbox.id, "error": str(error)}
