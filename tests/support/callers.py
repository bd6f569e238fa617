"""Who asks, in tests that are about something else."""

from __future__ import annotations

from forkd.model.caller import ALL_SCOPES, DEFAULT_TENANT, Caller

CALLER = Caller("tests", DEFAULT_TENANT, ALL_SCOPES, "test")
"""May do anything."""
