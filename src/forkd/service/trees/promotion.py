"""Let a child take its parent's place: id, name, address, and what is above them both.

    1  hold the child, its parent and every loser, so that nobody else changes them
    2  one transaction: the child is the parent, the parent has the child's id and is
       stopping, and so are the losers
    3  end the losers and the old parent
    4  give the child's tap the parent's address, and tell its guest who it is

A crash before 2 leaves everything as it was.  After it the rest follows by itself: what
is stopping is reaped at the next start, and a row marked `renaming` goes through 4 again.

The child's process, folder, cgroup and tap stay what they were, under the names they were
made with: nothing about them can be renamed in one step with the transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forkd.engine.replies import Clock
from forkd.errors import Conflict, ForkdError, NotFound
from forkd.model.sandbox import Promotion, Sandbox, SandboxState
from forkd.model.tree import descendants
from forkd.network import taps
from forkd.network.plan import PREFIX_LENGTH
from forkd.service.lifecycle import LifeEvent, next_state
from forkd.service.sandboxes import machine_id
from forkd.service.tasks import to_end

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forkd.engine.guest import Guest
    from forkd.model.ids import SandboxId
    from forkd.network.plan import Slot
    from forkd.service.owner import SandboxOwner
    from forkd.service.sandboxes import Sandboxes

POST_FORK_TIMEOUT_S = 60.0
"""How long a guest may take to become its parent, the image's hook included."""

_SEED_BYTES = 64
_NS = 1_000_000_000

log = logging.getLogger(__name__)


async def promote(sandboxes: Sandboxes, child: SandboxId) -> Promotion:
    """Let `child` take its parent's place; the parent and whatever else it has below it end.

    Whoever calls sees to it that there is one promotion at a time, and that nobody branches
    the tree meanwhile.

    Raises:
        NotFound: There is no such sandbox.
        Conflict: It has no parent, the parent is gone, or it does not run.
        StoreError: It could not be written down; nothing has changed.
        EngineError: It is promoted, but its guest could not be told.
    """
    owner = sandboxes.owner(child)
    _check(owner.sandbox)
    parent = _parent_of(sandboxes, owner.sandbox)
    async with contextlib.AsyncExitStack() as stack:
        for each in (owner, parent):
            await stack.enter_async_context(each.held())
        _check(owner.sandbox)
        _check_place(parent.sandbox)
        all_ = sandboxes.list_all()
        lost = await _hold(stack, sandboxes, losers(owner.sandbox, all_))
        heirs = await _hold(stack, sandboxes, [each.id for each in descendants(child, all_)])
        await to_end(_exchange(sandboxes, _Cast(owner, parent, lost, heirs)))
    ended = tuple(each.sandbox.id for each in (parent, *lost))
    await to_end(sandboxes.delete_all(ended))
    await to_end(finish(sandboxes, owner))
    log.info("sandbox promoted", extra={"sandbox": owner.sandbox.id, "ended": len(ended)})
    return Promotion(owner.sandbox, ended)


def losers(child: Sandbox, all_: Iterable[Sandbox]) -> tuple[SandboxId, ...]:
    """Return what ends with the parent of `child`: all below it but the child and its own."""
    if child.parent is None:
        return ()
    below = descendants(child.parent, all_)
    return tuple(each.id for each in below if child.id not in (each.id, *each.ancestors))


def in_place_of(child: Sandbox, parent: Sandbox, address: str | None) -> Sandbox:
    """Return `child` in the place of `parent`, at an address."""
    return replace(
        child,
        id=parent.id,
        hostname=parent.hostname,
        address=address,
        created_at=parent.created_at,
        ancestors=parent.ancestors,
        branched_at=parent.branched_at,
        expires_at=parent.expires_at,
    )


def without(sandbox: Sandbox, promoted: SandboxId) -> Sandbox:
    """Return a descendant of the promoted child, which its parent's id now means."""
    kept = tuple(each for each in sandbox.ancestors if each != promoted)
    return replace(sandbox, ancestors=kept)


async def finish(sandboxes: Sandboxes, owner: SandboxOwner) -> None:
    """Give a promoted sandbox its address and tell its guest who it is; idempotent.

    Raises:
        ForkdError: It could not be done; it is tried again at the next start.
    """
    async with owner.held() as sandbox:
        if not owner.renaming:
            return
        if sandbox.state is SandboxState.RUNNING:
            if owner.slot is not None:
                await asyncio.to_thread(taps.readdress, owner.slot)
            await _introduce(owner.guest, sandbox, owner.slot)
        owner.renaming = False
        await sandboxes.remember([owner.row])


async def finish_quietly(sandboxes: Sandboxes, owner: SandboxOwner) -> None:
    """Finish a promotion that an earlier daemon began; a failure is logged."""
    try:
        await finish(sandboxes, owner)
    except ForkdError as error:
        log.warning(
            "promotion not finished", extra={"sandbox": owner.sandbox.id, "error": str(error)}
        )


def _check(child: Sandbox) -> None:
    next_state(child.state, LifeEvent.PROMOTE)
    if child.parent is None:
        raise Conflict(f"sandbox {child.id} was not branched from another", sandbox=child.id)


def _check_place(parent: Sandbox) -> None:
    if parent.state is SandboxState.STOPPING:
        raise Conflict(f"sandbox {parent.id}, its parent, is being deleted", sandbox=parent.id)


def _parent_of(sandboxes: Sandboxes, child: Sandbox) -> SandboxOwner:
    try:
        return sandboxes.owner(child.ancestors[-1])
    except NotFound:
        raise Conflict(f"sandbox {child.parent}, its parent, is gone", sandbox=child.id) from None


@dataclass(frozen=True, slots=True)
class _Cast:
    """Everybody whose row changes; all of them are held.

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


async def _hold(
    stack: contextlib.AsyncExitStack, sandboxes: Sandboxes, ids: Iterable[SandboxId]
) -> list[SandboxOwner]:
    """Hold those of `ids` that are still there when their turn comes."""
    found = []
    for id_ in ids:
        with contextlib.suppress(NotFound):
            owner = sandboxes.owner(id_)
            await stack.enter_async_context(owner.held())
            found.append(owner)
    return found


async def _exchange(sandboxes: Sandboxes, cast: _Cast) -> None:
    """Write down who everybody is from now on, and then let everybody see it."""
    child, parent = cast.child, cast.parent
    before = child.sandbox
    slot = sandboxes.inherited(child.slot, parent.slot)
    address = None if slot is None else slot.guest
    after: list[tuple[SandboxOwner, Sandbox]] = [
        (child, in_place_of(before, parent.sandbox, address)),
        (parent, replace(_stopping(parent.sandbox), id=before.id)),
        *((each, _stopping(each.sandbox)) for each in cast.lost),
        *((each, without(each.sandbox, before.id)) for each in cast.heirs),
    ]
    rows = [replace(owner.row, sandbox=sandbox) for owner, sandbox in after]
    rows[0] = replace(rows[0], renaming=True, network_index=None if slot is None else slot.index)
    await sandboxes.remember(rows)
    for owner, sandbox in after:
        owner.sandbox = sandbox
    child.renaming = True
    sandboxes.exchange(child, parent, slot)
    child.watch_expiry()


def _stopping(sandbox: Sandbox) -> Sandbox:
    if sandbox.state is SandboxState.STOPPING:
        return sandbox
    return replace(sandbox, state=next_state(sandbox.state, LifeEvent.LOSE))


async def _introduce(guest: Guest, sandbox: Sandbox, slot: Slot | None) -> None:
    """Have the agent do what it does after a fork, as another; then set its clock right."""
    network = None
    if slot is not None:
        network = {"mac": slot.mac, "address": f"{slot.guest}/{PREFIX_LENGTH}"}
    await guest.ask(
        "post_fork",
        {
            "sandbox_id": sandbox.id,
            "hostname": sandbox.hostname,
            "machine_id": machine_id(sandbox.id),
            "boot_id": str(uuid.uuid4()),
            "seed": secrets.token_hex(_SEED_BYTES),
            "realtime_ns": time.time_ns(),
            "network": dict(network) if network else None,
        },
        timeout_s=POST_FORK_TIMEOUT_S,
    )
    before_ns = time.time_ns()
    told = await guest.ask("adjust_time", {"offset_ns": 0}, Clock)
    here_ns = (before_ns + time.time_ns()) // 2
    await guest.ask("adjust_time", {"offset_ns": here_ns - told.realtime_ns})
