"""Events as Server-Sent Events: what browsers, proxies and every language can follow.

    id: 17
    event: sandbox.ready
    data: {"id": 17, "event": "sandbox.ready", …}

A client that comes back names the last id that it was given.  That is an event's, or one on a line
of its own beside a comment, at the beginning and whenever nothing was sent for a while: it
keeps the connection, and a client that hears of little from falling behind.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from forkd.daemon import convert_events
from forkd.daemon.streaming import Stream
from forkd.errors import CapacityError, InvalidRequest
from forkd.limits import EVENT_ID_MAX
from forkd.model.event import Event, EventKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from starlette.responses import Response

    from forkd.model.caller import Tenant
    from forkd.model.event import EventBatch

EVENT_STREAM = "text/event-stream"

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""What keeps proxies from holding events back."""

LAST_EVENT_ID = "Last-Event-ID"

RENDERED_MAX = 1_000
"""Most events whose text is kept: many clients are sent the same ones at the same time."""

_ID = re.compile(r"[0-9]{1,19}", re.ASCII)


def parse_event_id(text: str) -> int:
    """Return the id that a client says it was given last.

    Raises:
        InvalidRequest: It is none.
    """
    if _ID.fullmatch(text) is None or int(text) > EVENT_ID_MAX:
        raise InvalidRequest(
            f"{LAST_EVENT_ID} must be the id of an event, a number: {text[:80]!r}",
            field=LAST_EVENT_ID,
        )
    return int(text)


class EventTexts:
    """Events as they are sent, each rendered once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Tenant, int], tuple[Event, bytes]] = {}

    async def stream(self, batches: AsyncGenerator[EventBatch, None]) -> Response:
        """Return `batches` as an answer.

        Raises:
            ForkdError: Whatever they raise before the first.
        """
        first = await anext(batches, None)
        if first is None:
            raise CapacityError("the daemon is about to end; try again later")
        pieces = self._pieces(first, batches)
        return Stream(pieces, owned=batches, media_type=EVENT_STREAM, headers=HEADERS)

    async def _pieces(
        self, first: EventBatch, rest: AsyncGenerator[EventBatch, None]
    ) -> AsyncIterator[bytes]:
        yield _place(first.up_to) if not first.events else self._text(first)
        async for batch in rest:
            yield self._text(batch)

    def _text(self, batch: EventBatch) -> bytes:
        said = b"".join(map(self._event, batch.events))
        at = batch.events[-1].id if batch.events else None
        return said if at == batch.up_to else said + _place(batch.up_to)

    def _event(self, event: Event) -> bytes:
        if event.kind is EventKind.GAP:  # its id may be that of an event, for others
            return _event(event)
        key = event.owner.tenant, event.id
        known = self._known.get(key)
        if known is None or known[0] != event:
            if len(self._known) >= RENDERED_MAX:
                self._known.clear()
            known = self._known[key] = event, _event(event)
        return known[1]


def _event(event: Event) -> bytes:
    # In ASCII: some clients take more characters for ends of lines than there are.
    data = json.dumps(convert_events.event(event).model_dump())
    return f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n".encode()


def _place(id_: int) -> bytes:
    return b": nothing more so far\nid: %d\n\n" % id_
