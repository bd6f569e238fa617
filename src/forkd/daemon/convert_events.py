"""Between what clients see of events and usage, and what we think in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.model.event import EventKind
from forkd.wire import v2_events

if TYPE_CHECKING:
    from forkd.model.event import Event
    from forkd.model.usage import Usage


def event(of: Event) -> v2_events.EventInfo:
    """Return an event; a gap is nobody's."""
    is_gap = of.kind is EventKind.GAP
    return v2_events.EventInfo(
        id=of.id,
        event=of.kind.value,
        at_unix=of.at.timestamp(),
        subject=None if is_gap else of.subject,
        tenant=None if is_gap else of.owner.tenant,
        principal=None if is_gap else of.owner.principal,
        request_id=of.request_id,
        detail=dict(of.detail),
    )


def usage(of: Usage) -> v2_events.UsageInfo:
    """Return what a sandbox uses."""
    traffic, io = of.traffic, of.io
    return v2_events.UsageInfo(
        id=of.sandbox.id,
        snapshot_tag=of.sandbox.tag,
        tenant=of.sandbox.owner.tenant,
        created_at_unix=int(of.sandbox.created_at.timestamp()),
        measured_at_unix=of.at.timestamp(),
        cpu_secs=of.cpu_s,
        memory_private_bytes=of.private_bytes,
        memory_private_exact=of.private_exact,
        memory_cgroup_bytes=of.cgroup_bytes,
        disk_bytes=of.disk_bytes,
        io_read_bytes=None if io is None else io.read_bytes,
        io_written_bytes=None if io is None else io.written_bytes,
        io_reads=None if io is None else io.reads,
        io_writes=None if io is None else io.writes,
        network_received_bytes=None if traffic is None else traffic.received_bytes,
        network_sent_bytes=None if traffic is None else traffic.sent_bytes,
    )
