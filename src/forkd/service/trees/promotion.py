"""Let a child take its parent's place: id, name, address, and what is above them both.

    1  take the child, its parent and every loser exclusively
    2  one transaction: the child is the parent, the parent has the child's id and is
       stopping, and so are the losers
    3  end the losers and the old parent
    4  give the child's tap the parent's address, and its guest its new identity

A crash before 2 leaves everything as it was.  After it the rest follows by itself: what
is stopping is reaped at the next start, and 4 is tried again, in the background and at the next
start, while the row is marked `renaming`.

The child's process, folder, cgroup and tap stay what they were, under the names they were
made with: nothing about them can be renamed in one step with the transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forkd.engine.control import Control
from forkd.errors import Conflict, EngineError, ForkdError, NotFound
from forkd.model.caller import Scope
from forkd.model.event import EventKind
from forkd.model.sandbox import Promotion, Sandbox, SandboxState
from forkd.model.tree import descendants
from forkd.service.sandboxes.identity import identity_of
from forkd.service.sandboxes.lifecycle import LifeEvent, check, next_state
from forkd.service.supervision import TaskKind, to_end
from forkd.service.use_case import use_case

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forkd.model.caller import Caller
    from forkd.model.ids import SandboxId
    from forkd.network.plan import Slot
    from forkd.service.leases import Leases
    from forkd.service.records import Records
    from forkd.service.sandboxes.component import Sandboxes
    from forkd.service.sandboxes.owner import SandboxOwner
    from forkd.service.supervision import Supervisor
    from forkd.service.trees.growth import Growth
    from forkd.telemetry.telemetry import Telemetry

IDENTIFY_DEADLINE_S = 60.0
"""How long a guest may take to get its parent's identity, the image's hook included."""

RETRY_S_MIN, RETRY_S_MAX = 1.0, 60.0
"""How long after a guest did not take its new identity it is tried again; doubled each time."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Cast:
    """Everybody whose row changes; all are taken exclusively.

    Attributes:
        child: Who is promoted.
        parent: Whose place it takes.
        lost: Who else ends.
        heirs: Who was branched from the child.
    """

    child: SandboxOwner
    parent: SandboxOwner
    lost: list[SandboxOwner]
    heirs: list[SandboxOwner]


@dataclass(frozen=True, slots=True)
class Promotions:
    """Promotes sandboxes; `forkd.service.api_trees.Promotions` documents what a caller may ask."""

    telemetry: Telemetry
    tasks: Supervisor
    records: Records
    leases: Leases
    sandboxes: Sandboxes
    growth: Growth

    @use_case("promote", Scope.RUN)
    async def promote(self, caller: Caller, sandbox: SandboxId) -> Promotion:
        """Let a sandbox take its parent's place."""
        child = self.sandboxes.roster.get(caller, sandbox)
        with self.growth.promoting(child.sandbox.root):
            return await to_end(self._promote(caller, child))

    def finish_in_background(self, owner: SandboxOwner) -> None:
        """Finish a promotion that was interrupted, however often it must be tried."""
        work = self._finish_patiently(owner)
        self.tasks.run(TaskKind.FINISH_PROMOTION, work, owner.sandbox.id)

    async def _promote(self, caller: Caller, child: SandboxOwner) -> Promotion:
        before = child.sandbox
        _check(before)
        parent = self._parent_of(caller, child.sandbox)
        async with contextlib.AsyncExitStack() as stack:
            for each in (child, parent):
                await stack.enter_async_context(each.exclusive("promote"))
            _check(child.sandbox)
            _check_place(parent.sandbox)
            all_ = self.sandboxes.roster.all()
            lost = await self._take(stack, losers(child.sandbox, all_))
            heirs = [each.id for each in descendants(child.sandbox.id, all_)]
            await self._exchange(_Cast(child, parent, lost, await self._take(stack, heirs)))
        ended = tuple(each.sandbox.id for each in (parent, *lost))
        await self.sandboxes.delete_all(ended)
        try:
            await self._finish(child)
        except ForkdError:
            self.finish_in_background(child)
            raise
        log.info("sandbox promoted", extra={"sandbox": child.sandbox.id, "ended": len(ended)})
        promoted = child.sandbox
        about: dict[str, str | int] = {"was": before.id, "ended": len(ended)}
        kind = EventKind.SANDBOX_PROMOTED
        self.sandboxes.journal.note(kind, promoted.id, promoted.owner, **about)
        return Promotion(child.sandbox, ended)

    def _parent_of(self, caller: Caller, child: Sandbox) -> SandboxOwner:
        try:
            return self.sandboxes.roster.get(caller, child.ancestors[-1])
        except NotFound:
            raise Conflict(
                f"sandbox {child.parent}, its parent, is gone", sandbox=child.id
            ) from None

    async def _take(
        self, stack: contextlib.AsyncExitStack, ids: Iterable[SandboxId]
    ) -> list[SandboxOwner]:
        """Take those of `ids` exclusively that are still there when their turn comes."""
        taken = []
        for owner in filter(None, map(self.sandboxes.roster.find, ids)):
            with contextlib.suppress(NotFound):
                await stack.enter_async_context(owner.exclusive("promote"))
                taken.append(owner)
        return taken

    async def _exchange(self, cast: _Cast) -> None:
        """Write down who everybody is from now on, and then let everybody see it."""
        child, parent = cast.child, cast.parent
        before = child.sandbox
        slot = self.leases.inherited(child.lease, parent.lease)
        after: list[tuple[SandboxOwner, Sandbox]] = [
            (child, in_place_of(before, parent.sandbox, slot)),
            (parent, replace(_stopping(parent.sandbox), id=before.id, name=None)),
            *((each, _stopping(each.sandbox)) for each in cast.lost),
            *((each, without(each.sandbox, before.id)) for each in cast.heirs),
        ]
        rows = [replace(owner.row, sandbox=sandbox) for owner, sandbox in after]
        index = None if slot is None else slot.index
        rows[0] = replace(rows[0], renaming=True, network_index=index)
        await self.records.put(rows)
        for owner, sandbox in after:
            owner.sandbox = sandbox
        child.renaming = True
        self.sandboxes.roster.reindex((child, parent))
        self.leases.transfer(parent.lease, child.lease)
        child.lease.held = child.sandbox.egress_held
        child.watch_expiry()

    async def _finish(self, owner: SandboxOwner) -> None:
        """Give a promoted sandbox its address and its guest its identity; idempotent.

        Raises:
            ForkdError: It could not be done; it may be tried again.
        """
        async with owner.exclusive("rename") as sandbox:
            if not owner.renaming:
                return
            if sandbox.state is SandboxState.RUNNING:
                await self.leases.readdress(owner.lease)
                await _identify(owner, sandbox)
            row = replace(owner.row, renaming=False)
            await self.records.put([row])
            owner.renaming = False

    async def _finish_patiently(self, owner: SandboxOwner) -> None:
        wait_s = RETRY_S_MIN
        while owner.renaming:
            try:
                await self._finish(owner)
            except NotFound:
                return
            except ForkdError as error:
                about = {"sandbox": owner.sandbox.id, "error": str(error)}
                log.warning("promotion not finished", extra=about)
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, RETRY_S_MAX)


async def _identify(owner: SandboxOwner, sandbox: Sandbox) -> None:
    """Give a promoted sandbox's guest its new identity.

    A machine that an earlier forkd started cannot: its guest keeps its hostname until it is reset.
    """
    identity = identity_of(sandbox, owner.lease.slot, None)
    try:
        async with await Control.connect(owner.control) as control:
            await control.identify(sandbox.id, identity, deadline_s=IDENTIFY_DEADLINE_S)
    except EngineError as error:
        if error.context.get("control_code") != "invalid_request":
            raise
        log.warning("guest not renamed", extra={"sandbox": sandbox.id, "error": str(error)})


def losers(child: Sandbox, all_: Iterable[Sandbox]) -> tuple[SandboxId, ...]:
    """Return what ends with the parent of `child`: all below it but the child and its own."""
    if child.parent is None:
        return ()
    below = descendants(child.parent, all_)
    return tuple(each.id for each in below if child.id not in (each.id, *each.ancestors))


def in_place_of(child: Sandbox, parent: Sandbox, slot: Slot | None) -> Sandbox:
    """Return `child` in the place of `parent`, at the addresses of a link.

    A promotion gives it that place, and no more than the place had: egress stays held if it was.
    """
    return replace(
        child,
        id=parent.id,
        hostname=parent.hostname,
        address=None if slot is None else slot.guest,
        address_v6=slot.guest_v6 if slot is not None and slot.ipv6 else None,
        created_at=parent.created_at,
        ancestors=parent.ancestors,
        branched_at=parent.branched_at,
        expires_at=parent.expires_at,
        idle_ttl_s=parent.idle_ttl_s,
        name=parent.name,
        owner=parent.owner,
        egress_held=parent.egress_held,
    )


def without(sandbox: Sandbox, promoted: SandboxId) -> Sandbox:
    """Return a descendant of the promoted child, which its parent's id now means."""
    kept = tuple(each for each in sandbox.ancestors if each != promoted)
    return replace(sandbox, ancestors=kept)


def _check(child: Sandbox) -> None:
    check(child, LifeEvent.PROMOTE)
    if child.parent is None:
        raise Conflict(f"sandbox {child.id} was not branched from another", sandbox=child.id)


def _check_place(parent: Sandbox) -> None:
    if parent.state is SandboxState.STOPPING:
        raise Conflict(f"sandbox {parent.id}, its parent, is being deleted", sandbox=parent.id)


def _stopping(sandbox: Sandbox) -> Sandbox:
    if sandbox.state is SandboxState.STOPPING:
        return sandbox
    return replace(sandbox, state=next_state(sandbox.state, LifeEvent.LOSE))
