"""What happens to sandboxes and snapshots, one event at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from forkd.model.caller import DEFAULT_OWNER, Owner

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime


class EventKind(StrEnum):
    """What happened."""

    SANDBOX_READY = "sandbox.ready"
    SANDBOX_FAILED = "sandbox.failed"
    SANDBOX_BRANCHED = "sandbox.branched"
    SANDBOX_RESET = "sandbox.reset"
    SANDBOX_PROMOTED = "sandbox.promoted"
    SANDBOX_PAUSED = "sandbox.paused"
    SANDBOX_RESUMED = "sandbox.resumed"
    SANDBOX_EXITED = "sandbox.exited"
    SANDBOX_DELETED = "sandbox.deleted"
    SNAPSHOT_WRITING = "snapshot.writing"
    SNAPSHOT_READY = "snapshot.ready"
    SNAPSHOT_FAILED = "snapshot.failed"
    SNAPSHOT_DELETED = "snapshot.deleted"
    GAP = "gap"
    """Events are missing here; no sandbox's and no snapshot's."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        id: Its place in a history, that of the host or of a tenant; greater than that of every
            earlier event.
        at: When it happened, UTC.
        kind: What happened.
        subject: The sandbox's id or the snapshot's tag; of a gap, empty.
        owner: Whose the subject is.
        request_id: The request that it was a part of; None for what happened by itself.
        detail: What else there is to say: a reason, a parent, a time in milliseconds.
        tenant_id: Its place in the history of its owner's tenant.
    """

    id: int
    at: datetime
    kind: EventKind
    subject: str
    owner: Owner = DEFAULT_OWNER
    request_id: str | None = None
    detail: Mapping[str, str | int | float] = field(default_factory=dict)
    tenant_id: int = 0

    def as_told_to_tenant(self) -> Event:
        """Return the event with its place in its tenant's history alone."""
        if self.kind is EventKind.GAP:
            return gap(self.tenant_id - 1, self.tenant_id, self.at)
        return replace(self, id=self.tenant_id)


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events that follow on one another, as one caller may see them.

    Attributes:
        events: In the order of their ids; may be none.
        up_to: The id from which to go on, in the history that the caller sees: of the last of
            them, or of one before that it was given already.
    """

    events: tuple[Event, ...]
    up_to: int


def gap(after: int, up_to: int, at: datetime) -> Event:
    """Return the event that stands for those that are missing after an id, up to another."""
    return Event(up_to, at, EventKind.GAP, "", detail={"after": after})
