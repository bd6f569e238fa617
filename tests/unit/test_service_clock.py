"""What is due at a time of the wall clock is due by it, whatever becomes of the clock."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

import pytest

from forkd.engine.guest import CLOCK_TRIES_MAX, Guest
from forkd.engine.replies import GuestTime
from forkd.errors import CapacityError, Conflict, EngineError, EngineTimeout
from forkd.host import wallclock
from forkd.model.ids import new_sandbox_id
from forkd.service import clock as clocks
from forkd.service import guest_clocks
from forkd.service.clock import WallClock
from forkd.service.guest_clocks import GuestClocks
from forkd.service.supervision import Supervisor, Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.service.sandboxes.roster import Roster

DEADLINE_S = 10.0
HOUR = timedelta(hours=1)


class HostClock:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.set = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.set


async def test_a_step_forward_brings_what_is_due_and_a_step_back_puts_it_off() -> None:
    host, due = HostClock(), asyncio.Event()
    clock = WallClock(host.now)
    clock.call_at(host.now() + HOUR, due.set)

    host.set = -HOUR
    clock.note_step(-3_600)
    host.set = HOUR - timedelta(seconds=5)
    clock.note_step(7_195)
    await asyncio.sleep(0)
    assert not due.is_set()

    host.set = HOUR
    clock.note_step(5)
    await asyncio.wait_for(due.wait(), DEADLINE_S)
    assert clock.timers == set()


async def test_nothing_is_due_early_though_nobody_told_of_a_step_back() -> None:
    host, due = HostClock(), asyncio.Event()
    clock = WallClock(host.now)
    timer = clock.call_at(host.now(), due.set)
    host.set = -HOUR

    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not due.is_set()
    timer.cancel()
    timer.cancel()
    assert clock.timers == set()


async def test_a_suspend_is_a_step_and_slewing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a suspend the monotonic clock does not run."""
    readings, told, done = iter([0, 9_000_000, 8 * 3_600 * 10**9]), list[float](), asyncio.Event()

    async def at_once(_steps: wallclock.Steps, _timeout_s: float) -> None:
        await asyncio.sleep(0)

    def distance() -> int:
        found = next(readings, None)
        if found is None:
            done.set()
            return 8 * 3_600 * 10**9
        return found

    monkeypatch.setattr(wallclock, "distance_ns", distance)
    monkeypatch.setattr(wallclock.Steps, "wait", at_once)
    clock = WallClock()
    clock.on_step.append(told.append)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        watching = group.create_task(clock.watch())
        await done.wait()
        watching.cancel()

    assert told == [8 * 3_600.0]


async def test_the_kernels_timer_is_quiet_as_long_as_nobody_sets_the_clock() -> None:
    before = wallclock.distance_ns()
    with wallclock.Steps() as steps:
        await steps.wait(0.01)
        await steps.wait(0.0)
    assert abs(wallclock.distance_ns() - before) < clocks.STEP_S_MIN * 1e9


class FarGuest(Guest):
    """A guest whose clock is off, and that is asked by `adjust_time` alone."""

    def __init__(self, *, off_ns: int, sticks: bool = False) -> None:
        self.off_ns, self._sticks, self.asked = off_ns, sticks, 0

    async def _adjust_time(self, offset_ns: int) -> GuestTime:
        self.asked += 1
        if not self._sticks:
            self.off_ns -= offset_ns
        wall_ns = int(datetime.now(UTC).timestamp() * 1e9)
        return GuestTime.read({"realtime_ns": wall_ns - self.off_ns}, "adjust_time")


@pytest.mark.parametrize("off_ns", [0, 3_600 * 10**9, -2 * 3_600 * 10**9])
async def test_a_guests_clock_is_moved_by_what_it_is_off(off_ns: int) -> None:
    guest = FarGuest(off_ns=off_ns)

    assert await guest.follow_clock() == pytest.approx(off_ns / 1e9, abs=0.5)

    assert abs(guest.off_ns) < 10**9
    assert guest.asked <= 5


async def test_a_guest_whose_clock_cannot_be_set_is_given_up() -> None:
    guest = FarGuest(off_ns=10**12, sticks=True)
    with pytest.raises(EngineError, match=f"wrong after {CLOCK_TRIES_MAX} corrections"):
        await guest.follow_clock()


class Owner:
    """Of a sandbox whose guest follows, or fails as it is told first."""

    def __init__(self, *fails: Exception) -> None:
        self.sandbox = type("Sandbox", (), {"id": new_sandbox_id()})
        self.fails = list(fails)
        self.followed = asyncio.Event()
        self.asked = 0

    def running_guest(self) -> Owner:
        return self

    async def follow_clock(self) -> float:
        self.asked += 1
        await asyncio.sleep(0)
        if self.fails:
            raise self.fails.pop(0)
        self.followed.set()
        return 0.0


async def test_every_guest_follows_a_step_and_who_does_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guest_clocks, "LOOK_EVERY_S", 0.0)
    well, slow, ended = Owner(), Owner(EngineTimeout("no answer")), Owner(Conflict("it exited"))
    owners = [well, slow, ended]

    class Some:
        def __iter__(self) -> Iterator[Owner]:
            return iter(owners)

    async with Supervisor() as tasks:
        guests = GuestClocks(tasks, cast("Roster", Some()))
        guests.note_step(3_600)
        for each in (well, slow):
            await asyncio.wait_for(each.followed.wait(), DEADLINE_S)

    assert (well.asked, slow.asked) == (1, 2)


async def test_a_crash_of_what_sets_guests_clocks_is_logged_and_ends_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        def __iter__(self) -> Iterator[Owner]:
            raise RuntimeError("a bug")

    ended = asyncio.Event()
    async with Supervisor() as tasks:
        run = tasks.run

        def watched(*args: object, **options: object) -> object:
            task: Task[object] = run(*args, **options)  # type: ignore[arg-type]  # as it was called
            task.when_done(ended.set)
            return task

        tasks.run = watched  # type: ignore[method-assign,assignment]  # to know when it has ended
        GuestClocks(tasks, cast("Roster", Broken())).note_step(1)
        await asyncio.wait_for(ended.wait(), DEADLINE_S)
        assert tasks.failure is None

    assert [each.getMessage() for each in caplog.records] == ["task crashed"]


async def test_a_step_is_told_that_came_while_there_was_no_room_to_watch_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals, make, told = [CapacityError("too many open files")], wallclock.Steps.__init__, []
    is_told = asyncio.Event()

    def refuse_once(steps: wallclock.Steps) -> None:
        if refusals:
            raise refusals.pop()
        make(steps)

    def note(moved_s: float) -> None:
        told.append(moved_s)
        is_told.set()

    monkeypatch.setattr(clocks, "RETRY_S", 0.0)
    monkeypatch.setattr(wallclock, "distance_ns", lambda: 0 if refusals else 60 * 10**9)
    monkeypatch.setattr(wallclock.Steps, "__init__", refuse_once)
    clock = WallClock()
    clock.on_step.append(note)
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        watching = group.create_task(clock.watch())
        await is_told.wait()
        watching.cancel()

    assert told == [60.0]
