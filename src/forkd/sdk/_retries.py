"""Whether a request that failed is made again, and when: decisions without effects.

| what happened | which requests |
|---|---|
| the daemon was not reached, so it has done nothing | all |
| the daemon answered 503 and said when to try again; it has started nothing | all |
| the connection broke before the answer was whole | those that may be made twice |

Requests that may be made twice are GET, PUT and DELETE, and a POST with an `Idempotency-Key`: the
daemon answers the second one what it would have answered the first.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from forkd.errors import CapacityError, TransportError
from forkd.sdk._transport import was_lost, was_unsent

if TYPE_CHECKING:
    from forkd.errors import ForkdError

RETRIES_MAX = 4
"""How often a request is made again, unless the client was told another number."""

RETRIES_UNSENT_MAX = 2
"""How often a daemon that cannot be reached is tried again: usually there is none."""

RETRY_S_MAX = 20.0
"""Longest time that one call waits between its attempts, all together."""

PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 2.0
"""How long before the next attempt, if the daemon does not say; doubled each time."""

JITTER = 0.5
"""Greatest part by which a pause is longer, so that clients do not come back all at once."""

REPEATABLE = {"GET", "PUT", "DELETE"}
"""Methods of requests that may be made twice."""


class Retries:
    """The attempts of one call.

    Attributes:
        lost: Whether an answer was lost, so that the daemon may have done it already.
    """

    def __init__(self, most: int, *, repeatable: bool, resendable: bool = True) -> None:
        self._left = most if resendable else 0
        self._unsent_left = min(self._left, RETRIES_UNSENT_MAX)
        self._repeatable = repeatable
        self._waited_s = 0.0
        self._pause_s = PAUSE_S_MIN
        self.lost = False

    def pause_s(self, error: ForkdError) -> float | None:
        """Return how long to wait before the next attempt; None to give up."""
        pause_s = self._wanted(error)
        if pause_s is None or self._left <= 0:
            return None
        pause_s *= 1 + random.uniform(0, JITTER)  # noqa: S311 - it guards nothing
        if self._waited_s + pause_s > RETRY_S_MAX:
            return None
        self._left -= 1
        self._waited_s += pause_s
        return pause_s

    def _wanted(self, error: ForkdError) -> float | None:
        if isinstance(error, CapacityError):
            told = error.context.get("retry_after_s")
            return float(told) if isinstance(told, int | float) else None
        if not isinstance(error, TransportError):
            return None
        if was_unsent(error):
            self._unsent_left -= 1
            return self._next() if self._unsent_left >= 0 else None
        if was_lost(error) and self._repeatable:
            self.lost = True
            return self._next()
        return None

    def _next(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_S_MAX)
        return pause_s
