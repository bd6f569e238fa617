"""How fast requests of one tenant begin, so that many of them leave the event loop to others.

The daemon has one event loop.  A tenant with hundreds of requests at once would have all of them do
a step before anybody else's does one.  So requests of a tenant begin one after the other.  While
others ask for something too, the next one begins only after as much time as the last one took: half
of the time is left to the others.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forkd.model.caller import Caller, Tenant

OTHERS_S = 1.0
"""For how long after its last request somebody counts as one who asks, too."""

GAP_S_MAX = 0.05
"""Most time that passes between two beginnings."""

SEEN_MAX = 1_024
"""Most tenants of which it is known when they have asked last."""


class Pace:
    """Has requests of one tenant begin one after the other."""

    def __init__(self) -> None:
        self._waiting: dict[Tenant, deque[asyncio.Future[None]]] = {}
        self._seen: OrderedDict[Tenant | None, float] = OrderedDict()

    async def begin(self, caller: Caller) -> None:
        """Return when a request of the caller may begin; at once unless others of its begin.

        Who may do anything never waits.
        """
        whose = None if caller.is_admin else caller.tenant
        self._seen[whose] = time.monotonic()
        self._seen.move_to_end(whose)
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        if whose is None:
            return
        queue = self._waiting.get(whose)
        if queue is None:
            self._waiting[whose] = deque()
            self._begun(whose)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        await turn

    def _begun(self, whose: Tenant) -> None:
        """Have the next one begin when this one has had its first step."""
        asyncio.get_running_loop().call_soon(self._stepped, whose, time.monotonic())

    def _stepped(self, whose: Tenant, began_s: float) -> None:
        now_s = time.monotonic()
        if self._others_ask(whose, now_s):
            gap_s = min(now_s - began_s, GAP_S_MAX)
            asyncio.get_running_loop().call_later(gap_s, self._next, whose)
        else:
            self._next(whose)

    def _next(self, whose: Tenant) -> None:
        queue = self._waiting[whose]
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                self._begun(whose)
                return
        del self._waiting[whose]

    def _others_ask(self, whose: Tenant, now_s: float) -> bool:
        latest = reversed(self._seen.items())
        last_s = next((seen_s for tenant, seen_s in latest if tenant != whose), None)
        return last_s is not None and now_s - last_s < OTHERS_S
