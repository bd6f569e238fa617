"""Times of the wall clock that hold also when it is set, or when the host was suspended.

The timers of the event loop run by the monotonic clock, which does not run in a suspend and knows
nothing of steps.  So whatever is due at a time of the wall clock is asked for here.  One task
watches the clock: after a step or a suspend every timer is compared again, and the others who want
to know are told.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.errors import CapacityError
from forkd.host import wallclock

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_EVERY_S = 30.0
"""How often the clocks are compared besides: for a kernel that does not tell of a suspend."""

RETRY_S = 5.0
"""After how long it is tried again to watch the clock, where there was no room for that."""

STEP_S_MIN = 0.01
"""What counts as a step: half of what a guest's clock may be off after a fork."""

log = logging.getLogger(__name__)


def _now() -> datetime:
    return datetime.now(UTC)


class WallTimer:
    """A call that is due at a time of the wall clock; `WallClock.call_at` makes them."""

    def __init__(self, clock: WallClock, when: datetime, call: Callable[[], object]) -> None:
        self._clock = clock
        self._when = when
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Have nothing called any more; idempotent."""
        self._clock.timers.discard(self)
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def arm(self) -> None:
        """Wait for as long as is left by the clock of now."""
        if self._handle is not None:
            self._handle.cancel()
        left_s = max(0.0, (self._when - self._clock.now()).total_seconds())
        self._handle = asyncio.get_running_loop().call_later(left_s, self._fire)

    def _fire(self) -> None:
        if self._clock.now() < self._when:  # the clock was set back, and nobody has told yet
            self.arm()
            return
        self.cancel()
        self._call()


class WallClock:
    """The wall clock of one host.

    Args:
        now: What it says.

    Attributes:
        timers: What is due.
        on_step: Called after each step of the clock, and after a suspend, with how far it went.
    """

    def __init__(self, now: Callable[[], datetime] = _now) -> None:
        self.now = now
        self.timers: set[WallTimer] = set()
        self.on_step: list[Callable[[float], None]] = []

    def call_at(self, when: datetime, call: Callable[[], object]) -> WallTimer:
        """Have `call` called by the event loop once the clock says `when`, or more."""
        timer = WallTimer(self, when, call)
        self.timers.add(timer)
        timer.arm()
        return timer

    async def watch(self) -> None:
        """Notice steps and suspends until cancelled; while there is no room for that, try again.

        Raises:
            HostError: The kernel does not let us.
        """
        before_ns = wallclock.distance_ns()
        with await _steps() as steps:
            while True:
                now_ns = wallclock.distance_ns()
                moved_s = (now_ns - before_ns) / 1e9
                if abs(moved_s) >= STEP_S_MIN:
                    before_ns = now_ns
                    self.note_step(moved_s)
                await steps.wait(LOOK_EVERY_S)

    def note_step(self, moved_s: float) -> None:
        """Compare every timer with the clock again, and tell who wants to know."""
        log.info("the wall clock was set, or the host was suspended", extra={"moved_s": moved_s})
        for timer in tuple(self.timers):
            timer.arm()
        for tell in self.on_step:
            tell(moved_s)


async def _steps() -> wallclock.Steps:
    """Return what tells of steps, as soon as there is room for it."""
    while True:
        try:
            return wallclock.Steps()
        except CapacityError as error:
            log.warning("the wall clock is not watched", extra={"error": str(error)})
            await asyncio.sleep(RETRY_S)
