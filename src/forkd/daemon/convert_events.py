"""Between what clients see of events and usage, and what we think in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.model.event import EventKind
from forkd.wire import v2_events

if TYPE_CHECKING:
    from forkd.model.event import Event


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
