"""What happens to sandboxes and snapshots, and what sandboxes use, on the wire.

The rules are those of `wire.v2`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from forkd import limits
from forkd.wire.parts import Answer, Query

EventId = Annotated[int, Field(ge=0, le=limits.EVENT_ID_MAX)]


class EventsRead(Query):
    """Which events."""

    after: EventId | None = Field(
        default=None,
        description="Id of the last event that the client knows; 0 for all that are kept. Without "
        "it only what comes from now on. A `Last-Event-ID` header comes before it.",
    )
    follow: bool = Field(
        default=True, description="Go on with what comes; false: end after what there is."
    )


class EventInfo(Answer):
    """One event: the `data` of a server-sent event, whose `id` and `event` say the same."""

    id: int = Field(description="Greater than that of every event before.")
    event: str = Field(
        description="What happened: `sandbox.` with ready, failed, branched, reset, promoted, "
        "paused, resumed, exited, deleted; `snapshot.` with writing, ready, failed, deleted; "
        "`gap` if events up to this id are missing. There may be more: ignore what you do not know."
    )
    at_unix: float = Field(description="When, in seconds, to the microsecond.")
    subject: str | None = Field(description="The sandbox's id or the snapshot's tag.")
    tenant: str | None = Field(description="Whose that is.")
    principal: str | None = Field(description="Who made it.")
    request_id: str | None = Field(description="The `X-Request-Id` that it was a part of.")
    detail: dict[str, str | int | float] = Field(
        description="What else there is to say: a reason, a parent, a time in milliseconds."
    )


class UsageInfo(Answer):
    """What a running sandbox uses of its host."""

    id: str
    snapshot_tag: str
    tenant: str
    created_at_unix: int
    measured_at_unix: float = Field(description="When, in seconds, to the microsecond.")
    cpu_secs: float = Field(description="CPU time that it has had since it was forked.")
    memory_private_bytes: int = Field(description="Its private memory.")
    memory_private_exact: bool = Field(
        description="Whether that was counted. Of many sandboxes some are counted each time; "
        "before it was, this is an upper bound, which has what branches share with their source."
    )
    memory_cgroup_bytes: int | None = Field(
        description="What counts against its memory limit; null without a limit."
    )
    disk_bytes: int = Field(
        description="Disk that it has written, with what it shares with its branches."
    )
    io_read_bytes: int | None = Field(
        default=None,
        description="What was read of its disk since it was forked; null where that is not "
        "counted: there is no cgroup, or no disk.",
    )
    io_written_bytes: int | None = Field(default=None, description="What was written, likewise.")
    io_reads: int | None = Field(default=None, description="By so many operations, likewise.")
    io_writes: int | None = Field(default=None, description="By so many operations, likewise.")
    network_received_bytes: int | None = Field(description="null without a network.")
    network_sent_bytes: int | None = Field(description="null without a network.")
