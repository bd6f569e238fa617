"""ERROR frames as exceptions: the one place that knows both vocabularies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.errors import (
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

if TYPE_CHECKING:
    from forkd.model.json import JsonObject

_CONTROL: dict[str, type[ForkdError]] = {
    "state": Conflict,
    "io": HostError,
    "kvm": HostError,
    "not_ours": StoreError,
    "too_new": StoreError,
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
    "no_runtime": Conflict,
    "warm_up_failed": WarmUpError,
    "warm_up_timeout": WarmUpError,
}


def control_fault(code: str, message: str) -> ForkdError:
    """Return the exception for an error of a VMM process; its code is in `control_code`."""
    return _CONTROL.get(code, EngineError)(message, control_code=code)


def guest_fault(members: JsonObject) -> ForkdError:
    """Return the exception for an agent's ERROR frame; its code is in `guest_code`."""
    code, message = str(members.get("code")), str(members.get("message"))
    context = {"guest_code": code}
    field = members.get("field")
    if isinstance(field, str):
        context["field"] = field
    return _GUEST.get(code, GuestError)(message, **context)
