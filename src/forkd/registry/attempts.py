"""Whether a registry is asked once more for a thing, and when: decisions without effects.

| what happened | is it asked again? |
|---|---|
| it was not reached, and has not answered anything yet | no: the name is wrong, or it is down |
| it cannot be reached any more, or the connection broke | for what may be asked for twice |
| it answered that it is busy: 429, 502, 503, 504 | yes, after the time that it says |
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import httpx

from forkd.registry import limits

if TYPE_CHECKING:
    from collections.abc import Mapping

BUSY = frozenset({429, 502, 503, 504})
"""What a registry answers, or a proxy before it, that may do later what was asked."""

REPEATABLE = frozenset({"GET", "HEAD"})
"""Methods of requests that may be made twice."""

JITTER = 0.5
"""Greatest part by which a pause is longer, so that clients do not come back all at once."""


class Attempts:
    """The attempts to have one thing."""

    def __init__(self) -> None:
        self._left = limits.REGISTRY_ATTEMPTS_MAX - 1
        self._pause_s = limits.REGISTRY_PAUSE_S_MIN

    def pause_s(self, told: Mapping[str, str] | None = None) -> float | None:
        """Return how long to wait before the next attempt; None to give up.

        Args:
            told: Headers of an answer, of which `Retry-After` may say how long.
        """
        if self._left <= 0:
            return None
        self._left -= 1
        told_s = _retry_after_s(told or {})
        if told_s > limits.REGISTRY_PAUSE_S_MAX:
            return None
        pause_s, self._pause_s = self._pause_s, 2 * self._pause_s
        return max(told_s, pause_s * (1 + random.uniform(0, JITTER)))  # noqa: S311 - it guards nothing


def may_repeat(method: str, error: Exception) -> bool:
    """Whether a request may be made again that was not answered as a whole."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return True  # nothing was sent
    return isinstance(error, httpx.TransportError) and method in REPEATABLE


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that an answer says; 0 if it says none, or a date."""
    said = headers.get("Retry-After", "").strip()
    return float(said) if said.isdecimal() and said.isascii() else 0.0
