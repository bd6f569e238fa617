"""Errors of machines and agents become the narrowest class that a caller can act on."""

from __future__ import annotations

import pytest

from forkd.engine.faults import control_fault, guest_fault
from forkd.errors import (
    Busy,
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


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("damaged", StoreError),
        ("too_new", StoreError),
        ("too_old", StoreError),
        ("not_ours", StoreError),
        ("cpu_mismatch", StoreError),
        ("kvm", HostError),
        ("io", HostError),
        ("state", Conflict),
        ("guest", GuestError),
        ("invalid_request", EngineError),
        ("a code of the future", EngineError),
    ],
)
def test_a_machines_error_keeps_its_code(code: str, kind: type[ForkdError]) -> None:
    error = control_fault({"code": code, "message": "why"})

    assert (type(error), str(error), error.context["control_code"]) == (kind, "why", code)


@pytest.mark.parametrize("said", ["op: unknown operation", "unknown field `x`, expected `y`"])
def test_what_an_earlier_vmm_does_not_know_is_refused_with_the_way_out(said: str) -> None:
    error = control_fault({"code": "invalid_request", "message": said})

    assert type(error) is EngineError  # what callers do without is asked for by its code
    assert error.context["control_code"] == "invalid_request"
    assert "started by an earlier forkd" in str(error)
    assert str(error).endswith(f"fork another sandbox ({said})")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("not_found", NotFound),
        ("exists", Conflict),
        ("no_runtime", Conflict),
        ("warm_up_failed", WarmUpError),
        ("no_space", GuestError),
        ("busy", Busy),
        ("a code of the future", GuestError),
    ],
)
def test_an_agents_error_keeps_its_code(code: str, kind: type[ForkdError]) -> None:
    error = guest_fault({"code": code, "message": "why"})

    assert (type(error), str(error), error.context["guest_code"]) == (kind, "why", code)


@pytest.mark.parametrize(
    "message",
    ["unknown field `user`, expected one of `path`, `mode`", "unknown operation"],
)
def test_an_agent_that_is_too_old_is_said_to_be(message: str) -> None:
    error = guest_fault({"code": "invalid_request", "message": message, "field": "user"})

    assert isinstance(error, Conflict)
    assert "bake the snapshot again" in str(error)
    assert message[:40] in str(error)


def test_the_field_that_an_agent_refused_is_passed_on() -> None:
    error = guest_fault({"code": "invalid_request", "message": "why", "field": "cwd"})

    assert isinstance(error, InvalidRequest)
    assert error.context["field"] == "cwd"
