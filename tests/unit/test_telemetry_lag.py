"""The lag of the event loop is the longest of the last minute."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from forkd.telemetry import lag

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Clock:
    """A loop that a test lets be late."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.due_s = 0.0
        self.cancelled = False

    def time(self) -> float:
        return self.now_s

    def call_at(self, due_s: float, call: Callable[[], None]) -> Clock:
        self.due_s, self._call = due_s, call
        return self

    def cancel(self) -> None:
        self.cancelled = True

    def go_on(self, late_s: float) -> None:
        self.now_s = self.due_s + late_s
        self._call()


def test_a_loop_that_was_late_is_told_of_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    with lag.LoopLag() as found:
        assert found.longest_s() == 0.0
        clock.go_on(late_s=0.0)
        clock.go_on(late_s=2.0)
        assert found.longest_s() == 2.0
        for _ in range(110):
            clock.go_on(late_s=0.001)
        assert found.longest_s() == 2.0
        for _ in range(15):
            clock.go_on(late_s=0.001)
        assert found.longest_s() < 0.01
        clock.now_s = clock.due_s + 3.0  # late, and nobody was told yet
        assert found.longest_s() == 3.0
    assert clock.cancelled
