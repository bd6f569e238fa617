"""By how much the event loop is late: how long everybody else may have to wait in it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

EVERY_S = 0.5
"""How often it is looked at."""

WINDOW_S = 60.0
"""For how long it is remembered: longer than most scrapers wait between two scrapes."""


class LoopLag:
    """Watches the loop that runs, within its `with` block."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._late: deque[tuple[float, float]] = deque(maxlen=int(WINDOW_S / EVERY_S))
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._wait()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def longest_s(self) -> float:
        """Return by how much it was late at most within the last `WINDOW_S`; now included."""
        now_s = self._loop.time()
        recent = (late_s for at_s, late_s in self._late if now_s - at_s <= WINDOW_S)
        return max([now_s - self._due_s, 0.0, *recent])

    def _wait(self) -> None:
        self._due_s = self._loop.time() + EVERY_S
        self._timer = self._loop.call_at(self._due_s, self._note)

    def _note(self) -> None:
        now_s = self._loop.time()
        self._late.append((now_s, now_s - self._due_s))
        self._wait()
