"""ERROR frames as exceptions: the one place that knows both vocabularies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from forkd.engine.replies import AgentError, ControlError
from forkd.errors import (
    Busy,
    CapacityError,
    Conflict,
    EngineError,
    ForkdError,
    GuestError,
    HostError,
    InvalidRequest,
    NotFound,
    StoreError,
    WarmUpError,
)
from forkd.limits import SHORT_RETRY_S

if TYPE_CHECKING:
    from forkd.model.json import JsonObject

_CONTROL: dict[str, type[ForkdError]] = {
    "state": Conflict,
    "io": HostError,
    "kvm": HostError,
    "capacity": CapacityError,
    "not_ours": StoreError,
    "too_new": StoreError,
    "too_old": StoreError,
    "damaged": StoreError,
    "cpu_mismatch": StoreError,
    "guest": GuestError,
}

_GUEST: dict[str, type[ForkdError]] = {
    "invalid_request": InvalidRequest,
    "not_found": NotFound,
    "exists": Conflict,
    "not_a_directory": Conflict,
    "is_a_directory": Conflict,
    "not_empty": Conflict,
    "refused": Conflict,
    "no_runtime": Conflict,
    "warm_up_failed": WarmUpError,
    "warm_up_timeout": WarmUpError,
    "busy": Busy,
}


_UNKNOWN = ("unknown field", "unknown operation", "invalid type: map, expected a string")
"""How an agent begins that does not know what a later one does."""

_UNKNOWN_TO_VMM = re.compile(r"\bunknown (field|operation)\b")
"""What a VMM says that does not know what a later one does."""

_UNKNOWN_CHARS = 80
"""How much of it is said on: what follows lists all that the agent does know."""

_TOO_OLD = "the agent in this sandbox's snapshot is too old for this; bake the snapshot again"

_VMM_TOO_OLD = (
    "this sandbox's machine was started by an earlier forkd, whose VMM cannot do this; "
    "fork another sandbox"
)

_NO_SPACE = "no space"
"""What the kernel says, in any case, where a disk is full."""


def control_fault(members: JsonObject) -> ForkdError:
    """Return the exception for an error of a VMM process; its code is in `control_code`."""
    said = ControlError.read(members, "a request")
    kind = _CONTROL.get(said.code, EngineError)
    if kind is HostError and _NO_SPACE in said.message.lower():
        return CapacityError(said.message, control_code=said.code)
    if said.code == "invalid_request" and _UNKNOWN_TO_VMM.search(said.message):
        # We ask only for what some VMM knows.
        words = f"{_VMM_TOO_OLD} ({said.message[:_UNKNOWN_CHARS]})"
        return EngineError(words, control_code=said.code)
    return kind(said.message, control_code=said.code)


def guest_fault(members: JsonObject) -> ForkdError:
    """Return the exception for an agent's ERROR frame; its code is in `guest_code`."""
    said = AgentError.read(members, "a request")
    context: dict[str, str | int] = {"guest_code": said.code}
    if said.field is not None:
        context["field"] = said.field
    kind, message = _GUEST.get(said.code, GuestError), said.message
    if kind is InvalidRequest and message.startswith(_UNKNOWN):
        # We ask only for what some agent knows.
        kind, message = Conflict, f"{_TOO_OLD} ({message[:_UNKNOWN_CHARS]})"
    if kind.retryable:
        context["retry_after_s"] = SHORT_RETRY_S
    return kind(message, **context)
