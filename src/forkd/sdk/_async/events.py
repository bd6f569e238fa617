"""What happens to sandboxes and snapshots, read from a stream of Server-Sent Events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from forkd.errors import CapacityError, TransportError
from forkd.sdk._transport import async_pause
from forkd.wire.v2_events import EventInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.sdk._async.http import AsyncHttp

SILENCE_S = 60.0
"""How long a daemon may send nothing before it is taken for gone: it says something every 15 s."""

PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
"""How long after a connection broke the next is made; doubled each time."""


class _Place:
    """How far a client has come.

    Attributes:
        after: The last id that the daemon named; None before the first.
        pause_s: How long to wait before the next connection.
        connected: Whether there was one.
    """

    def __init__(self, after: int | None) -> None:
        self.after = after
        self.pause_s = PAUSE_S_MIN
        self.connected = False

    def note(self, said: dict[str, str]) -> None:
        """Note that the daemon has said something, and up to where that is."""
        given = said.get("id", "")
        if not given.isdecimal():
            raise TransportError(f"this is no stream of events of ours: {said}")
        self.after, self.pause_s, self.connected = int(given), PAUSE_S_MIN, True


async def followed(
    http: AsyncHttp, after: int | None, *, follow: bool, reconnect: bool
) -> AsyncIterator[EventInfo]:
    """Yield events, over as many connections as it takes; `AsyncClient.events` documents it."""
    place = _Place(after)
    while True:
        try:
            async for event in _of_one_connection(http, place, follow=follow):
                yield event
            if not (follow and reconnect):
                return
        except (TransportError, CapacityError):
            if not (place.connected and reconnect):
                raise
        await async_pause(place.pause_s)
        place.pause_s = min(2 * place.pause_s, PAUSE_S_MAX)


async def _of_one_connection(
    http: AsyncHttp, place: _Place, *, follow: bool
) -> AsyncIterator[EventInfo]:
    query = {"after": place.after, "follow": follow}
    async with http.streamed("/v2/events", query, silence_s=SILENCE_S) as answer:
        said: dict[str, str] = {}
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if name:
                said[name] = value
            elif not line:
                place.note(said)
                if "data" in said:
                    yield _parsed(said["data"])
                said = {}


def _parsed(data: str) -> EventInfo:
    try:
        return EventInfo.model_validate_json(data)
    except ValidationError as error:
        raise TransportError(f"an event makes no sense to us: {data[:200]!r}") from error
