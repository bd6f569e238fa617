"""Which states follow on which: the whole life of a sandbox, as a table.

              change, limit, reset, branch, promote
                           +----+
                           v    |
    starting --ready--> running --ended--> exited
        |                  |                  |
      delete         delete, lose       delete, lose
        |                  v                  |
        +------------> stopping <-------------+   then it is gone

Pure; `service.owner` is the only caller that acts on it.
"""

from __future__ import annotations

from enum import StrEnum

from forkd.errors import Conflict
from forkd.model.sandbox import SandboxState


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
    (SandboxState.EXITED, LifeEvent.DELETE): SandboxState.STOPPING,
    (SandboxState.EXITED, LifeEvent.LOSE): SandboxState.STOPPING,
    (SandboxState.STOPPING, LifeEvent.ENDED): SandboxState.STOPPING,
}


def next_state(state: SandboxState, event: LifeEvent) -> SandboxState:
    """Return the state after `event`.

    Raises:
        Conflict: It cannot happen in `state`.
    """
    try:
        return _NEXT[state, event]
    except KeyError:
        raise Conflict(f"a sandbox that is {state} cannot take {event}") from None
