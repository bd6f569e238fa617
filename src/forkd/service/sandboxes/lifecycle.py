"""Which states follow on which: the whole life of a sandbox, as a table.

              change, limit, reset, branch, promote
                           +----+
                           v    |  --pause-->
    starting --ready--> running --+          paused (takes change, too)
        |                  |  |      <-resume--  |  |
        |                  |  +--ended--> exited <-ended
      delete         delete, lose            |   |
        |                  v           delete, lose
        +------------> stopping <------------+---+      then it is gone

Pure; `service.owner` is the only caller that acts on it.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from forkd.errors import Conflict
from forkd.model.sandbox import SandboxState

if TYPE_CHECKING:
    from forkd.model.sandbox import Sandbox


class LifeEvent(StrEnum):
    """What can happen to a sandbox."""

    READY = "ready"
    ENDED = "ended"
    DELETE = "delete"
    RESET = "reset"
    LIMIT = "limit"
    CHANGE = "change"
    BRANCH = "branch"
    PROMOTE = "promote"
    PAUSE = "pause"
    RESUME = "resume"
    LOSE = "lose"


_NEXT: dict[tuple[SandboxState, LifeEvent], SandboxState] = {
    (SandboxState.STARTING, LifeEvent.READY): SandboxState.RUNNING,
    (SandboxState.STARTING, LifeEvent.DELETE): SandboxState.STOPPING,
    (SandboxState.RUNNING, LifeEvent.ENDED): SandboxState.EXITED,
    (SandboxState.RUNNING, LifeEvent.DELETE): SandboxState.STOPPING,
    (SandboxState.RUNNING, LifeEvent.RESET): SandboxState.RUNNING,
    (SandboxState.RUNNING, LifeEvent.LIMIT): SandboxState.RUNNING,
    (SandboxState.RUNNING, LifeEvent.CHANGE): SandboxState.RUNNING,
    (SandboxState.RUNNING, LifeEvent.BRANCH): SandboxState.RUNNING,
    (SandboxState.RUNNING, LifeEvent.PROMOTE): SandboxState.RUNNING,
    (SandboxState.RUNNING, LifeEvent.LOSE): SandboxState.STOPPING,
    (SandboxState.RUNNING, LifeEvent.PAUSE): SandboxState.PAUSED,
    (SandboxState.RUNNING, LifeEvent.RESUME): SandboxState.RUNNING,
    (SandboxState.PAUSED, LifeEvent.PAUSE): SandboxState.PAUSED,
    (SandboxState.PAUSED, LifeEvent.RESUME): SandboxState.RUNNING,
    (SandboxState.PAUSED, LifeEvent.CHANGE): SandboxState.PAUSED,
    (SandboxState.PAUSED, LifeEvent.ENDED): SandboxState.EXITED,
    (SandboxState.PAUSED, LifeEvent.DELETE): SandboxState.STOPPING,
    (SandboxState.PAUSED, LifeEvent.LOSE): SandboxState.STOPPING,
    (SandboxState.EXITED, LifeEvent.DELETE): SandboxState.STOPPING,
    (SandboxState.EXITED, LifeEvent.LOSE): SandboxState.STOPPING,
    (SandboxState.STOPPING, LifeEvent.ENDED): SandboxState.STOPPING,
}


def after(sandbox: Sandbox, event: LifeEvent) -> Sandbox:
    """Return a sandbox in the state that an event leads to; raises as `next_state`."""
    return replace(sandbox, state=next_state(sandbox.state, event))


def next_state(state: SandboxState, event: LifeEvent) -> SandboxState:
    """Return the state after `event`.

    Raises:
        Conflict: It cannot happen in `state`.
    """
    try:
        return _NEXT[state, event]
    except KeyError:
        raise Conflict(f"a sandbox that is {state} cannot take {event}") from None


def check(sandbox: Sandbox, event: LifeEvent) -> None:
    """Return if `event` can happen to a sandbox.

    Raises:
        Conflict: It cannot; the message names the sandbox if it is paused.
    """
    if sandbox.state is SandboxState.PAUSED and (sandbox.state, event) not in _NEXT:
        raise paused(sandbox)
    next_state(sandbox.state, event)


def paused(sandbox: Sandbox) -> Conflict:
    """Return the error of who wants something of a sandbox that is paused."""
    return Conflict(f"sandbox {sandbox.id} is paused: resume it first", sandbox=sandbox.id)
