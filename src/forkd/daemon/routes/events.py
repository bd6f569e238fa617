"""What happens to sandboxes and snapshots."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Query, Response
from fastapi.requests import HTTPConnection

from forkd.daemon.clients import EVENTS_PATH
from forkd.daemon.event_stream import EVENT_STREAM, EventTexts, parse_event_id
from forkd.daemon.routes import CallerOf, JournalOf, router
from forkd.wire import v2_events

routes = router("events")


@routes.get(
    EVENTS_PATH,
    operation_id="follow_events",
    response_class=Response,
    responses={200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}}},
)
async def follow_events(
    query: Annotated[v2_events.EventsRead, Query()],
    caller: CallerOf,
    journal: JournalOf,
    connection: HTTPConnection,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Stream what happens as Server-Sent Events, whose `data` is an `EventInfo`."""
    texts: EventTexts = connection.app.state.event_texts
    after = query.after if last_event_id is None else parse_event_id(last_event_id)
    return await texts.stream(journal.follow(caller, after, follow=query.follow))
