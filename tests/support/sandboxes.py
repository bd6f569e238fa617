"""Sandboxes as values: with what every sandbox has, and with everything that one can have."""

from __future__ import annotations

from datetime import UTC, datetime

from forkd.model.ids import SandboxId, new_sandbox_id, parse_tag
from forkd.model.network import parse_policy
from forkd.model.sandbox import Sandbox, SandboxState, SpawnTimes

MADE_AT = datetime(2026, 1, 2, tzinfo=UTC)


def a_sandbox(*ancestors: SandboxId) -> Sandbox:
    """Return a sandbox that runs, branched from others if there are any."""
    return Sandbox(
        id=new_sandbox_id(),
        tag=parse_tag("python"),
        state=SandboxState.RUNNING,
        created_at=MADE_AT,
        hostname="name",
        ancestors=ancestors,
    )


def a_full_sandbox(created_at: datetime) -> Sandbox:
    """Return a sandbox with a value in every column of the database."""
    return Sandbox(
        id=new_sandbox_id(),
        tag=parse_tag("python"),
        state=SandboxState.RUNNING,
        created_at=created_at,
        hostname="name",
        pid=7,
        address="10.200.0.2",
        address_v6="fd66:6b64:ac8::2",
        memory_limit_mib=512,
        disk_limit_mib=1024,
        spawn=SpawnTimes(0.1, 0.2, 0.3, 0.4, 1.0),
        exit_reason=None,
        ancestors=(new_sandbox_id(), new_sandbox_id()),
        branched_at=datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC),
        expires_at=datetime(2026, 1, 3, tzinfo=UTC),
        cpu_limit=0.5,
        cpu_weight=50,
        pids_limit=32,
        io_limit_mib_s=20,
        io_limit_ops=500,
        bandwidth_limit_mbit=10,
        attempts=2,
        network=parse_policy(["internet", "10.0.0.0/8:5432/tcp", "*.example.com:443"]),
        egress_held=True,
    )
