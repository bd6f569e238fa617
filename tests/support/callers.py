"""Who asks, in tests that are about something else."""

from __future__ import annotations

from forkd.model.caller import ALL_SCOPES, DEFAULT_TENANT, TENANT_SCOPES, Caller, Tenant

CALLER = Caller("tests", DEFAULT_TENANT, ALL_SCOPES, "test")
"""May do anything."""


def tenant(name: str) -> Caller:
    """Return a caller of a tenant, with all scopes that are about one tenant."""
    return Caller(f"token:{name}", Tenant(name), TENANT_SCOPES, "test")
