"""A sandbox as people read it: columns of a list, and all of it with labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.cli import render
from forkd.cli.tables import Column, time_shown
from forkd.cli.units import MIB, counted, shown_duration, shown_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkd.sdk import Sandbox
    from forkd.wire.v2 import SandboxFailure, SandboxInfo


def limits_shown(sandbox: SandboxInfo) -> list[tuple[str, str]]:
    """Return a sandbox's limits with labels, without those that it has not."""
    sizes = (("Memory", sandbox.memory_limit_mib), ("Disk", sandbox.disk_limit_mib))
    found = [(label, shown_size(mib * MIB)) for label, mib in sizes if mib is not None]
    others = (
        ("CPU", sandbox.cpu_limit, "{:g} cores"),
        ("CPU weight", sandbox.cpu_weight, "{}"),
        ("Threads", sandbox.pids_limit, "{}"),
        ("Disk bandwidth", sandbox.io_limit_mib_s, "{} MiB/s"),
        ("Disk operations", sandbox.io_limit_ops, "{}/s"),
        ("Network bandwidth", sandbox.bandwidth_limit_mbit, "{} Mbit/s"),
    )
    return [*found, *((label, text.format(of)) for label, of, text in others if of is not None)]


def labels_shown(of: SandboxInfo) -> str:
    """Return a sandbox's labels."""
    return ", ".join(f"{key}={value}" for key, value in sorted(of.labels.items()))


def expiry_shown(of: SandboxInfo) -> str | None:
    """Return when a sandbox ends by itself; None for never."""
    ends, idle_s = of.expires_at_unix, of.idle_ttl_secs
    shown = [] if ends is None else [f"{time_shown(ends)} (in {render.until(ends)})"]
    if idle_s is not None:
        shown.append(f"after {shown_duration(idle_s)} without use")
    return ", or ".join(shown) or None


def details(of: SandboxInfo) -> list[tuple[str, object]]:
    """Return what there is to say of a sandbox, with labels."""
    limits = ", ".join(f"{label.lower()} {text}" for label, text in limits_shown(of))
    parent = None if of.parent_id is None else f"{of.parent_id}"
    addresses = filter(None, (of.guest_addr, of.guest_addr_v6))
    network = None if of.network is None else ", ".join(of.network) or "nothing"
    held = " (held: it may reach nothing now)" if of.egress_held else ""
    times = of.fork_ms
    return [
        ("Id", of.id),
        ("Name", of.name),
        ("Snapshot", of.snapshot_tag),
        ("Status", of.condition),
        ("Ended by", of.exit_reason),
        ("Created", f"{time_shown(of.created_at_unix)} ({render.age(of.created_at_unix)} ago)"),
        ("Expires", expiry_shown(of)),
        ("Labels", labels_shown(of)),
        ("Parent", parent),
        ("Host name", of.hostname),
        ("Address", ", ".join(addresses)),
        ("Network", None if network is None else f"{network}{held}"),
        ("Secrets", ", ".join(of.secrets)),
        ("Limits", limits or "none"),
        ("Process", of.pid),
        ("Tenant", of.tenant),
        ("Created by", of.created_by),
        ("Ready after", None if times is None else f"{times.total:.1f} ms"),
        ("Attempts", counted(of.attempts, "fork") if of.attempts > 1 else None),
    ]


NO_FAILURE = {"stage": None, "error": None, "code": None}
"""What a sandbox that was forked has in place of why it was not."""


def outcomes(ready: Sequence[Sandbox], failed: Sequence[SandboxFailure]) -> list[dict[str, object]]:
    """Return what became of each sandbox that was asked for, all with the same members.

    One that failed has the status `failed`, why, and null in place of what only a sandbox has.
    """
    from forkd.wire.v2 import SandboxInfo  # noqa: PLC0415 - `forkd --help` should not wait for it

    nothing = render.with_dates(dict.fromkeys(SandboxInfo.model_fields))
    return [
        *({**render.members(each.info), **NO_FAILURE} for each in ready),
        *({**nothing, **render.members(each)} for each in failed),
    ]


def _limits(of: SandboxInfo) -> str | None:
    return ", ".join(f"{label.lower()} {text}" for label, text in limits_shown(of)) or None


COLUMNS: tuple[Column[SandboxInfo], ...] = (
    Column("ID", lambda of: of.id, short=True),
    Column("NAME", lambda of: of.name, optional=True),
    Column("SNAPSHOT", lambda of: of.snapshot_tag),
    Column("STATUS", lambda of: of.condition),
    Column("AGE", lambda of: render.age(of.created_at_unix), minor=True),
    Column("ADDRESS", lambda of: of.guest_addr, minor=True),
    Column("ENDED BY", lambda of: of.exit_reason, optional=True),
    Column(
        "EXPIRES",
        lambda of: None if of.expires_at_unix is None else f"in {render.until(of.expires_at_unix)}",
        wide=True,
    ),
    Column("PARENT", lambda of: of.parent_id, wide=True, short=True),
    Column("TENANT", lambda of: of.tenant, wide=True),
    Column("LABELS", labels_shown, wide=True),
    Column("PID", lambda of: of.pid, wide=True, right=True),
    Column("LIMITS", _limits, wide=True),
)
"""What a list of sandboxes shows."""
