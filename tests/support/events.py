"""Waits for an event of a host's history."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from tests.support.callers import CALLER

if TYPE_CHECKING:
    from forkd.model.event import Event, EventKind
    from forkd.service.host import Host

DEADLINE_S = 30.0


async def next_of(host: Host, kind: EventKind, after: int = 0) -> Event:
    """Return the first event of a kind after an id."""
    async with (
        asyncio.timeout(DEADLINE_S),
        contextlib.aclosing(host.journal.follow(CALLER, after)) as batches,
    ):
        async for batch in batches:
            for event in batch.events:
                if event.kind is kind:
                    return event
    raise AssertionError(kind)
