"""Who asks, in tests that are about something else."""

from __future__ import annotations

from forkd.model.caller import ALL_SCOPES, DEFAULT_TENANT, Caller, Scope, Tenant

CALLER = Caller("tests", DEFAULT_TENANT, ALL_SCOPES, "test")
"""May do anything."""


def tenant(name: str) -> Caller:
    """Return a caller of a tenant, with every scope but `admin`."""
    return Caller(f"token:{name}", Tenant(name), ALL_SCOPES - {Scope.ADMIN}, "test")
