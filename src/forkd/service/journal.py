"""The history of a host: what happened to sandboxes and snapshots, for whoever follows it.

An event has an id, one more than that of the event before, that no other ever has.  Followers are
told of it a moment later, and it is written down in the background; a follower that was away asks
for what came after the last id that it has seen.  Where an id is missing (its event was too old,
or a daemon was killed before it was written down) there is a *gap*: whoever reads notices it by
the ids alone, and is told.

There are two numbers for that: the place in the history of the host, which callers with `admin` are
told, and the place in that of a tenant, which its own callers are told: ids of the host would tell
them how much others do.  docs/adr/0045-tenants-have-histories-of-their-own.md has the reasons.

Followers read one shared history, each at its own pace: an event costs the same whether one
follows or five hundred, and a slow follower reads from the database what is in memory no more: its
tenant's events alone, by a connection that nobody waits for who writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

from forkd.errors import CapacityError, ForkdError
from forkd.limits import SHORT_RETRY_S
from forkd.model.caller import Scope, request_id
from forkd.model.event import Event, EventBatch, EventKind, gap
from forkd.service.places import Places
from forkd.service.use_case import streaming_use_case
from forkd.store import history

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator

    from forkd.model.caller import Caller, Owner, Tenant
    from forkd.service.records import Records
    from forkd.telemetry.telemetry import Telemetry

RECENT_MAX = 2_000
"""Most events in memory that are written down: who has not seen them in time reads them there."""

UNWRITTEN_MAX = 20_000
"""Most events in memory that cannot be written down: as many as sandboxes, should all of them be
made, or end, at once."""

FOLLOWERS_MAX = 1_024
"""Most followers at once: what the daemon's addresses allow together."""

WRITE_EVERY_S = 0.2
"""How long events are gathered before they are written down together."""

WRITE_RETRY_S = 5.0
"""How long after events could not be written down it is tried again."""

WRITTEN_AT_ONCE = 1_000
"""Most events written down at once, so that a sandbox's row does not wait long behind them."""

TELL_EVERY_S = 0.1
"""How long events are gathered before followers are told: what made them is answered first."""

TOLD_AT_ONCE = 10
"""Followers that are told before others get a turn: five hundred of them take tens of ms."""

TELLING_SHARE_MAX = 1 / 40
"""Most of the time that is spent on telling followers: the more they are, the more events are
gathered for them."""

TELL_EVERY_S_MAX = 3.0
"""How long events are gathered at most, however long telling takes."""

IDLE_S = 15.0
"""How long a follower hears nothing before it is told how far the history has come."""

IDS_RESERVED = 1_000_000
"""How many ids are reserved at a time, so that none is given twice after a crash."""

IDS_SKIPPED = 2 * IDS_RESERVED
"""How many ids each tenant's history leaves out after a crash: more than may have been given out
and not written down, and the same whatever others did."""

READS_MAX = 2
"""Most reads of the database at once: one tenant's leave a place to the next one's."""

BATCH_MAX = 500
"""Most events that a follower is given at once."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    """How far a follower has come.

    Attributes:
        seen: In the history of the host.
        told: In the history that it sees.
    """

    seen: int
    told: int


@dataclass(frozen=True, slots=True)
class _Read:
    """A part of the host's history.

    Attributes:
        events: Those of it that a caller may see.
        up_to: The last id of the part.
        oldest: The first id that there is an event of, if that was looked for.
    """

    events: tuple[Event, ...]
    up_to: int
    oldest: int | None = None


class Journal:
    """Records events and tells followers; `write` writes them down, `tell` tells."""

    def __init__(self, telemetry: Telemetry, records: Records) -> None:
        self.telemetry = telemetry
        self._records = records
        self._recent: deque[Event] = deque(maxlen=RECENT_MAX)
        self._unwritten: list[Event] = []
        self._next_id = 1
        self._reserved_id = 0
        self._news = asyncio.Event()
        self._wanted = asyncio.Event()
        self._writing = asyncio.Lock()
        self._waiting: dict[asyncio.Future[None], Caller] = {}
        self._untold: dict[Tenant, Owner] = {}
        self._ended = False
        self._shared = self._begin = 0
        self._tenants: dict[Tenant, int] = {}
        self._reads = Places("reads of the history", READS_MAX, SHORT_RETRY_S)
        self.followers = 0

    async def begin(self) -> None:
        """Go on where the last daemon ended; after what it may have given out if it was killed."""
        extent = await self._records.ask(history.extent)
        if extent.reserved > extent.last:
            await self._records.ask(lambda db: history.skip(db, IDS_SKIPPED))
            extent = await self._records.ask(history.extent)
        self._shared, self._begin, self._tenants = extent.shared, extent.begin, extent.tenants
        self._next_id = max(extent.last, extent.reserved) + 1
        await self._reserve(IDS_RESERVED)

    async def write(self) -> None:
        """Write events down as they come; a vital task of the service."""
        try:
            while True:
                await self._wanted.wait()
                await asyncio.sleep(WRITE_EVERY_S)
                if not await self._write():
                    await asyncio.sleep(WRITE_RETRY_S)
                    self._wanted.set()
        finally:
            await self._write()

    async def tell(self) -> None:
        """Wake followers when there is something for them; a vital task of the service.

        Those that may not see what came sleep on: many followers of one tenant cost another none.
        """
        time_s = asyncio.get_running_loop().time
        while True:
            await self._news.wait()
            await asyncio.sleep(TELL_EVERY_S)
            self._news.clear()
            begun_s = time_s()
            owners, self._untold = self._untold.values(), {}
            waiting = iter([w for w, caller in self._waiting.items() if _any(caller, owners)])
            while some := tuple(islice(waiting, TOLD_AT_ONCE)):
                self._wake(some)
                await asyncio.sleep(0)
            await asyncio.sleep(min((time_s() - begun_s) / TELLING_SHARE_MAX, TELL_EVERY_S_MAX))

    async def close(self) -> None:
        """Write down what is left, and that no more ids were given out."""
        try:
            await self._write()
            await self._reserve(0)
        except ForkdError as error:
            log.warning("history not closed", extra={"error": str(error)})

    def note(
        self, kind: EventKind, subject: str, owner: Owner, **detail: str | float | None
    ) -> None:
        """Record what happened; never blocks and never fails."""
        said = {name: value for name, value in detail.items() if value is not None}
        tenant_id = self._tenants[owner.tenant] = self._last_of(owner.tenant) + 1
        now, request = datetime.now(UTC), request_id()
        event = Event(self._next_id, now, kind, subject, owner, request, said, tenant_id)
        self._next_id += 1
        self._recent.append(event)
        self._unwritten.append(event)
        self._untold[owner.tenant] = owner
        self._wanted.set()
        self._news.set()

    def end_followers(self) -> None:
        """Have every follower end, and those that come from now on, at once."""
        self._ended = True
        self._wake(self._waiting)

    @streaming_use_case("follow_events", Scope.READ)
    async def follow(
        self, caller: Caller, after: int | None = None, *, follow: bool = True
    ) -> AsyncGenerator[EventBatch, None]:
        """Yield the events that a caller may see, as they come; `forkd.service.api` documents it.

        Args:
            caller: Who asks.
            after: The last id that the caller has seen; None for what comes from now on.
            follow: Go on with what comes; or end after what there is.

        Raises:
            CapacityError: There are too many followers.
        """
        if self.followers >= FOLLOWERS_MAX:
            raise CapacityError(f"{FOLLOWERS_MAX} clients follow events already")
        self.followers += 1
        try:
            place = await self._place(caller, after)
            time_s, heard_s = asyncio.get_running_loop().time, -IDLE_S
            while not self._ended:
                place, events = await self._after(caller, place)
                seen = place.seen
                if events or time_s() - heard_s >= IDLE_S:
                    yield EventBatch(events, place.told)
                    heard_s = time_s()
                if seen == self._next_id - 1 and not self._ended:
                    if not follow:
                        return
                    await self._wait(caller, heard_s + IDLE_S)
        finally:
            self.followers -= 1

    async def _wait(self, caller: Caller, until_s: float) -> None:
        """Return when there is more that a caller may see, or at a time of the event loop."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = caller
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout_at(until_s):
                    await waiting
            finally:
                del self._waiting[waiting]

    def _wake(self, followers: Iterable[asyncio.Future[None]]) -> None:
        for each in followers:
            if not each.done():
                each.set_result(None)

    def _last_of(self, tenant: Tenant | None) -> int:
        """Return the last id of the history of a tenant, or of the host."""
        return self._next_id - 1 if tenant is None else self._tenants.get(tenant, self._begin)

    async def _place(self, caller: Caller, after: int | None) -> _Place:
        """Return where a caller stands that has seen an id of the history that it sees."""
        tenant = _history_of(caller)
        last = self._last_of(tenant)
        if after is None or after == last:
            return _Place(self._next_id - 1, last)
        if tenant is None or after > last:
            return _Place(min(after, self._next_id - 1), after)
        for event in (*reversed(self._recent), *reversed(self._unwritten)):
            if event.owner.tenant == tenant and event.tenant_id <= after:
                return _Place(event.id, after)
        async with self._reads.wait(caller):
            seen = await self._records.read(lambda db: history.reached(db, tenant, after))
        return _Place(seen, after)

    async def _after(self, caller: Caller, place: _Place) -> tuple[_Place, tuple[Event, ...]]:
        """Return what came after a place, or some of it, and the place after that.

        The events have the ids of the history that the caller sees.
        """
        tenant, now = _history_of(caller), datetime.now(UTC)
        last = self._last_of(tenant)
        if place.told > last:  # the caller's history is of another host, or another state
            return _Place(self._next_id - 1, last), (gap(place.told, last, now),)
        read = await self._read(caller, place.seen)
        events, told = read.events, place.told
        if tenant is None:
            events = tuple(_with_gaps(events, told, read.up_to))
            return _Place(read.up_to, read.up_to), events
        early: tuple[Event, ...] = ()
        until = min((read.oldest or 1) - 1, self._shared)
        if told < until:  # it was told ids of the host, and not all that came after is kept
            early, told = (gap(told, until, now),), until
        own = [each.as_told_to_tenant() for each in events]
        if read.up_to == self._next_id - 1:
            up_to = self._last_of(tenant)
        else:
            up_to = own[-1].id if own else told
        found = (*early, *_with_gaps(own, told, up_to, self._shared))
        return _Place(read.up_to, up_to), found

    async def _read(self, caller: Caller, seen: int) -> _Read:
        """Return what came after an id of the host's, or some of it, that a caller may see."""
        first = self._recent[0].id if self._recent else self._next_id
        if seen + 1 >= first:
            since = self._since(seen)[:BATCH_MAX]
            visible = tuple(each for each in since if _may_see(caller, each))
            return _Read(visible, since[-1].id if since else seen)
        tenant = _history_of(caller)
        unwritten = [
            each for each in self._unwritten if seen < each.id < first and _may_see(caller, each)
        ]
        async with self._reads.wait(caller):
            read = await self._records.read(
                lambda db: history.between(db, seen, first, BATCH_MAX, tenant)
            )
        found = read.events
        if len(found) < BATCH_MAX:
            last = found[-1].id if found else seen
            found = (*found, *(each for each in unwritten if each.id > last))[:BATCH_MAX]
        up_to = found[-1].id if len(found) == BATCH_MAX else first - 1
        oldest = read.oldest or min((each.id for each in self._unwritten), default=first)
        return _Read(found, up_to, oldest)

    def _since(self, seen: int) -> list[Event]:
        """Return the events in memory after an id; quick for who has seen almost all of them."""
        found: list[Event] = []
        for event in reversed(self._recent):
            if event.id <= seen:
                break
            found.append(event)
        return found[::-1]

    async def _write(self) -> bool:
        """Write down what is not; False if that failed."""
        async with self._writing:
            self._wanted.clear()
            try:
                while events := self._unwritten[:WRITTEN_AT_ONCE]:
                    if self._next_id + IDS_RESERVED // 2 > self._reserved_id:
                        await self._reserve(IDS_RESERVED)
                    await self._put(events)
                    del self._unwritten[: len(events)]
            except ForkdError as error:
                about = {"events": len(self._unwritten), "error": str(error)}
                log.warning("events not written", extra=about)
                self._drop_unwritten()
                return False
        return True

    def _drop_unwritten(self) -> None:
        """Forget events that cannot be written down, so that memory stays bounded: a gap."""
        del self._unwritten[:-UNWRITTEN_MAX]

    async def _put(self, events: list[Event]) -> None:
        await self._records.ask(lambda db: history.put(db, events))

    async def _reserve(self, count: int) -> None:
        """Note that so many ids from the next one on may be given out."""
        up_to = self._next_id - 1 + count
        await self._records.ask(lambda db: history.reserve(db, up_to))
        self._reserved_id = up_to


def _any(caller: Caller, owners: Iterable[Owner]) -> bool:
    """Whether a caller may see events of any of these."""
    return any(map(caller.may_touch, owners))


def _may_see(caller: Caller, event: Event) -> bool:
    return event.kind is EventKind.GAP or caller.may_touch(event.owner)


def _history_of(caller: Caller) -> Tenant | None:
    """Return whose history a caller sees: its tenant's, or None for the host's."""
    return None if caller.is_admin else caller.tenant


def _with_gaps(events: Iterable[Event], seen: int, up_to: int, sparse: int = 0) -> Iterator[Event]:
    """Yield events after one id up to another, with a gap where ids are missing.

    Those up to `sparse` are missing because they are others'.
    """
    for event in events:
        if event.id > max(seen, sparse) + 1:
            yield gap(seen, event.id - 1, datetime.now(UTC))
        yield event
        seen = event.id
    if max(seen, sparse) < up_to:
        yield gap(seen, up_to, datetime.now(UTC))
