"""The history of a host: what happened to sandboxes and snapshots, for whoever follows it.

An event has an id that no other ever has, greater than those before.  It is told to followers at
once and written down in the background; a follower that was away asks for what came after the last
id that it has seen.  What is too old to be there, or was not written down when a daemon was
killed, is a *gap*, and a follower is told of it, never of less than that.

Followers read one shared history, each at its own pace: an event costs the same whether one
follows or five hundred, and a slow follower reads from the database what is in memory no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.errors import CapacityError, ForkdError
from forkd.model.caller import DEFAULT_OWNER, Owner, Scope, request_id
from forkd.model.event import Event, EventKind
from forkd.service.use_case import streaming_use_case
from forkd.store import history

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from forkd.model.caller import Caller
    from forkd.service.records import Records
    from forkd.telemetry.telemetry import Telemetry

RECENT_MAX = 20_000
"""Most events in memory: as many as sandboxes, should all of them be made, or end, at once."""

FOLLOWERS_MAX = 1_000
"""Most followers at once."""

WRITE_EVERY_S = 0.2
"""How long events are gathered before they are written down together."""

IDS_RESERVED = 10_000
"""How many ids are reserved at a time, so that none is given twice after a crash."""

BATCH_MAX = 500
"""Most events that a follower reads from the database at once."""

log = logging.getLogger(__name__)


class Journal:
    """Records events and tells followers; `run` writes them down."""

    def __init__(self, telemetry: Telemetry, records: Records) -> None:
        self.telemetry = telemetry
        self._records = records
        self._recent: deque[Event] = deque(maxlen=RECENT_MAX)
        self._unwritten: list[Event] = []
        self._next_id = 1
        self._reserved_id = 0
        self._pruned_id = 0
        self._first_in_memory = 1
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()
        self._writing = asyncio.Lock()
        self._followers = 0

    @property
    def followers(self) -> int:
        """How many follow it now."""
        return self._followers

    async def open(self) -> None:
        """Go on where the last daemon ended; notes a gap if it was killed."""
        extent = await self._records.ask(history.extent)
        self._next_id = max(extent.last, extent.reserved) + 1
        self._pruned_id = extent.pruned
        self._first_in_memory = self._next_id
        await self._reserve(IDS_RESERVED)
        if extent.reserved > extent.last:
            self.note(EventKind.GAP, "", DEFAULT_OWNER)

    async def run(self) -> None:
        """Write events down as they come; a vital task of the service."""
        try:
            while True:
                await self._wanted.wait()
                await asyncio.sleep(WRITE_EVERY_S)
                await self._write()
        finally:
            await self._write()

    async def close(self) -> None:
        """Write down what is left, and that nothing was lost."""
        await self._write()
        await self._reserve(0)

    def note(
        self, kind: EventKind, subject: str, owner: Owner, **detail: str | float | None
    ) -> None:
        """Record what happened; never blocks and never fails."""
        said = {name: value for name, value in detail.items() if value is not None}
        event = Event(self._next_id, datetime.now(UTC), kind, subject, owner, request_id(), said)
        self._next_id += 1
        if len(self._recent) == RECENT_MAX:
            self._first_in_memory = self._recent[1].id
        self._recent.append(event)
        self._unwritten.append(event)
        self._wanted.set()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @streaming_use_case("follow_events", Scope.READ)
    async def follow(self, caller: Caller, after: int | None = None) -> AsyncGenerator[Event, None]:
        """Yield the events that a caller may see, as they come; `forkd.service.api` documents it.

        Args:
            caller: Who asks.
            after: The last id that the caller has seen; None for what comes from now on.

        Raises:
            CapacityError: There are too many followers.
        """
        if self._followers >= FOLLOWERS_MAX:
            raise CapacityError(f"{FOLLOWERS_MAX} clients follow events already")
        self._followers += 1
        try:
            seen = self._next_id - 1 if after is None else after
            while True:
                changed = self._changed
                events, now_seen = await self._after(seen)
                for event in events:
                    if event.kind is EventKind.GAP or caller.may_touch(event.owner):
                        yield event
                if now_seen == seen:
                    await changed.wait()
                seen = now_seen
        finally:
            self._followers -= 1

    async def _after(self, seen: int) -> tuple[list[Event], int]:
        """Return some of what came after an id, and the last id that this is up to."""
        if seen >= self._next_id:  # the caller's history is of another host, or another state
            return [self._gap(self._next_id - 1)], self._next_id - 1
        if seen < self._pruned_id:
            return [self._gap(self._pruned_id)], self._pruned_id
        if seen + 1 >= self._first_in_memory:
            events = self._since(seen)
            return events, events[-1].id if events else seen
        if self._unwritten and self._unwritten[0].id < self._first_in_memory:
            await self._write()
        events = list(await self._records.ask(lambda db: history.after(db, seen, BATCH_MAX)))
        return events, events[-1].id if events else self._first_in_memory - 1

    def _since(self, seen: int) -> list[Event]:
        """Return the events in memory after an id."""
        found: list[Event] = []
        for event in reversed(self._recent):
            if event.id <= seen:
                break
            found.append(event)
        return found[::-1]

    def _gap(self, last_lost: int) -> Event:
        return Event(last_lost, datetime.now(UTC), EventKind.GAP, "")

    async def _write(self) -> None:
        async with self._writing:
            self._wanted.clear()
            events, self._unwritten = self._unwritten, []
            if not events:
                return
            try:
                if self._next_id + IDS_RESERVED // 2 > self._reserved_id:
                    await self._reserve(IDS_RESERVED)
                self._pruned_id = await self._records.ask(lambda db: history.put(db, events))
            except ForkdError as error:  # a full disk: it is tried again with the next event
                about = {"events": len(events), "error": str(error)}
                log.warning("events not written", extra=about)
                self._unwritten = [*events, *self._unwritten]
                self._drop_unwritten()

    def _drop_unwritten(self) -> None:
        """Give up the oldest events that cannot be written, so that memory stays bounded."""
        lost, self._unwritten = self._unwritten[:-RECENT_MAX], self._unwritten[-RECENT_MAX:]
        if lost:
            self._pruned_id = lost[-1].id

    async def _reserve(self, count: int) -> None:
        """Note that so many ids from the next one on may be given out."""
        up_to = self._next_id - 1 + count
        await self._records.ask(lambda db: history.reserve(db, up_to))
        self._reserved_id = up_to
