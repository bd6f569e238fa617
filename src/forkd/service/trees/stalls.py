"""What a guest notices of a branch: the longest time for which it was paused.

Its agent watches from just before the pause until siblings have answered.  A guest that cannot
be asked is branched all the same, and the answer says why nothing is known.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.engine.guest_watch import watching
from forkd.errors import ForkdError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from forkd.engine.guest import Guest

WATCH_S = 2.0
"""Longest watch: a guest's agent wakes up each millisecond meanwhile."""

WATCH_LEAST_S = 0.02
"""Shortest one, should siblings have answered sooner: a guest pays for a branch at once."""

ANSWER_TIMEOUT_S = 2.0
"""How long a branch waits for a guest that does not answer, before and after."""


@dataclass(slots=True)
class Stall:
    """What a guest noticed, once the watch is over.

    Attributes:
        longest_ms: The longest time for which it was paused; None if that is not known.
        unknown: Why it is not known.
    """

    longest_ms: float | None = None
    unknown: str | None = None


@contextlib.asynccontextmanager
async def noticed(guest: Guest) -> AsyncGenerator[Stall, None]:
    """Watch a guest within the block; what it noticed is known after the block."""
    stall = Stall()
    async with contextlib.AsyncExitStack() as stack:
        watch = None
        try:
            watch = await stack.enter_async_context(
                watching(guest, WATCH_S, timeout_s=ANSWER_TIMEOUT_S)
            )
        except ForkdError as error:
            stall.unknown = str(error)
        yield stall
        if watch is None:
            return
        try:
            timeout_s = ANSWER_TIMEOUT_S + WATCH_LEAST_S
            stall.longest_ms = await watch.end(at_least_s=WATCH_LEAST_S, timeout_s=timeout_s)
        except ForkdError as error:
            stall.unknown = str(error)
