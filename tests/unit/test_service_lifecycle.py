"""A sandbox goes through its states in order, and nothing else can happen to it."""

from __future__ import annotations

from itertools import product

import pytest

from forkd.errors import Conflict
from forkd.model.sandbox import SandboxState
from forkd.service.sandboxes.lifecycle import LifeEvent, next_state

ALLOWED = {
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


@pytest.mark.parametrize(("state", "event"), list(product(SandboxState, LifeEvent)))
def test_each_state_takes_the_events_of_the_table_and_no_other(
    state: SandboxState, event: LifeEvent
) -> None:
    if (state, event) in ALLOWED:
        assert next_state(state, event) is ALLOWED[state, event]
        return

    with pytest.raises(Conflict):
        next_state(state, event)
