"""Each tenant who has something to do gets an equal share of the event loop's time."""

from __future__ import annotations

import asyncio
import contextvars
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from forkd.daemon import fair_loop
from forkd.daemon.fair_loop import (
    AT_ONCE,
    BACKLOG_S,
    EXPECTED_S,
    WAITED_PRICE,
    FairLoop,
    FairQueue,
    FairSelector,
    whose,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

STEP_S = 0.001
MANY = 400


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=FairLoop) as made:
        yield made


def work(order: list[str], name: str, steps: int, step_s: float) -> Coroutine[None, None, None]:
    """Do so many steps, each of which keeps the loop for some time."""

    async def run() -> None:
        whose.set(name)
        for _ in range(steps):
            await asyncio.sleep(0)
            order.append(name)
            until_s = time.perf_counter() + step_s
            while time.perf_counter() < until_s:
                pass

    return run()


@dataclass
class Turns:
    """A queue whose clock goes on only while one of its steps runs, or when it is told to."""

    loop: asyncio.AbstractEventLoop
    now_s: float = 100.0
    selector: FairSelector = field(default_factory=FairSelector)

    def __post_init__(self) -> None:
        self.queue = FairQueue(self.selector)

    def ask(self, name: str, steps: int = 1) -> None:
        """Have so many steps of a tenant become ready."""
        context = contextvars.copy_context()
        context.run(whose.set, name)
        for _ in range(steps):
            self.queue.append(asyncio.Handle(int, (), self.loop, context))

    def run(self, step_s: float = STEP_S) -> list[str]:
        """Run what the queue gives out until the next look; return whose the steps were."""
        ran = []
        assert self.queue
        for _ in range(len(self.queue)):
            handle = self.queue.popleft()
            if not handle.cancelled():
                ran.append(handle._context[whose])  # type: ignore[attr-defined]  # noqa: SLF001
                self.now_s += step_s
        return ran

    def held_s(self) -> float:
        """Return for how long the look waits now."""
        return self.selector.held_s(self.now_s)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner) -> Iterator[Turns]:
    """A red tenant has had something to do for a while, and has more."""
    made = Turns(runner.get_loop())
    with made.selector:
        monkeypatch.setattr(fair_loop, "time", SimpleNamespace(perf_counter=lambda: made.now_s))
        made.ask("blue")
        made.ask("red", MANY)
        made.run()
        while made.now_s < 100 + 2 * BACKLOG_S:
            made.run()
        yield made


def test_who_always_has_more_to_do_waits_for_who_is_expected_back(turns: Turns) -> None:
    turns.ask("blue")
    assert turns.run(STEP_S / 10) == ["blue"]
    assert turns.run() == []
    assert turns.held_s() == pytest.approx(EXPECTED_S)
    turns.now_s += EXPECTED_S / 2
    turns.ask("blue")
    assert turns.held_s() == 0  # what has arrived is looked at at once
    assert turns.run(STEP_S / 10) == ["blue"]
    turns.now_s += EXPECTED_S
    assert turns.run() == ["red"] * AT_ONCE


def test_nobody_is_waited_for_who_has_had_as_much_time(turns: Turns) -> None:
    turns.ask("blue")
    turns.run(STEP_S / 10)
    while turns.held_s():
        turns.selector.waited(STEP_S)
    assert turns.run()[:1] == ["red"]


def test_time_for_which_the_loop_waits_costs_a_part_of_it(turns: Turns) -> None:
    turns.ask("blue")
    turns.run(STEP_S / 10)
    used_s = turns.queue._used_s  # noqa: SLF001 - no other wants to know
    before_s = used_s["blue"]
    assert turns.held_s()
    turns.selector.waited(STEP_S)
    assert used_s["blue"] - before_s == pytest.approx(STEP_S * WAITED_PRICE)


def test_who_has_only_begun_to_have_something_to_do_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner
) -> None:
    turns = Turns(runner.get_loop())
    with turns.selector:
        monkeypatch.setattr(fair_loop, "time", SimpleNamespace(perf_counter=lambda: turns.now_s))
        turns.ask("red", MANY)
        turns.ask("blue")
        turns.run(BACKLOG_S / 4)
        assert turns.held_s() == 0
        assert "red" in turns.run()


def test_what_is_nobodys_does_not_wait(turns: Turns) -> None:
    turns.ask("blue")
    turns.run(STEP_S / 10)
    turns.ask("")
    assert turns.held_s() == 0
    assert turns.run() == [""]
    assert turns.held_s() > 0


def test_who_has_little_to_do_does_not_wait_for_all_of_who_has_much(runner: asyncio.Runner) -> None:
    order: list[str] = []

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(MANY):
                group.create_task(work(order, "red", 2, STEP_S))
            await asyncio.sleep(0)
            group.create_task(work(order, "blue", 8, 0))

    runner.run(main())
    assert len(order) == 2 * MANY + 8
    last = max(index for index, name in enumerate(order) if name == "blue")
    assert last < 10 * AT_ONCE < MANY


def test_two_that_have_much_to_do_get_the_same_time_however_long_their_steps_are(
    runner: asyncio.Runner,
) -> None:
    order: list[str] = []

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(MANY // 4):
                group.create_task(work(order, "red", 1, 4 * STEP_S))
            for _ in range(MANY):
                group.create_task(work(order, "blue", 1, STEP_S))

    runner.run(main())
    half = order[: len(order) // 2]
    assert 0.5 < 4 * half.count("red") / half.count("blue") < 2


def test_steps_of_one_run_in_the_order_in_which_they_became_ready(runner: asyncio.Runner) -> None:
    seen: dict[str, list[int]] = {"red": [], "blue": [], "": []}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        done = [asyncio.Event() for _ in seen]
        for (name, numbers), each in zip(seen.items(), done, strict=True):
            context = contextvars.copy_context()
            context.run(whose.set, name)
            for number in range(100):
                loop.call_soon(numbers.append, number, context=context)
            loop.call_soon(each.set, context=context)
        for each in done:
            await each.wait()

    runner.run(main())
    assert all(numbers == list(range(100)) for numbers in seen.values())


def test_what_other_threads_ask_for_is_done_once_and_in_order(runner: asyncio.Runner) -> None:
    count, threads = 2_000, 4
    seen: list[list[int]] = [[] for _ in range(threads)]

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def ask(add: Callable[[int], None], done: asyncio.Event) -> None:
            for number in range(count):
                loop.call_soon_threadsafe(add, number)
            loop.call_soon_threadsafe(done.set)

        done = [asyncio.Event() for _ in seen]
        with ThreadPoolExecutor(threads) as pool:
            for each, event in zip(seen, done, strict=True):
                loop.run_in_executor(pool, ask, each.append, event)
            for event in done:
                await event.wait()

    runner.run(main())
    assert seen == [list(range(count))] * threads


def test_a_socket_that_waits_to_be_read_is_read_once(runner: asyncio.Runner) -> None:
    """What is not read at once, because its tenant had much time, is found at each look."""
    order: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(0)
            read = asyncio.Event()

            def look() -> None:
                order.append("read")
                assert ours.recv(1) == b"1"  # raises if there is nothing
                read.set()

            async with asyncio.TaskGroup() as group:
                for number in range(MANY):
                    name = "red" if number % 2 else "blue"
                    group.create_task(work(order, name, 1, STEP_S))
                await group.create_task(work([], "green", 1, 100 * STEP_S))
                whose.set("green")
                loop.add_reader(ours, look)
                theirs.send(b"1")
                await read.wait()
            loop.remove_reader(ours)

    runner.run(main())
    assert order.count("read") == 1
    assert order.index("read") > AT_ONCE  # the loop has looked more than once


def test_sockets_that_wait_to_be_read_are_not_found_at_each_look(runner: asyncio.Runner) -> None:
    """Hundreds that were found again at every look would take the time of whoever has little."""
    sockets = 100
    order: list[str] = []
    told: list[int] = []
    read: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, FairLoop)
        selector = loop._selector  # type: ignore[attr-defined]  # noqa: SLF001 - who counts what it tells
        select = selector.select

        def counted(timeout: float | None = None) -> list[tuple[object, int]]:
            found: list[tuple[object, int]] = select(timeout)
            told.append(len(found))
            return found

        selector.select = counted
        pairs = [socket.socketpair() for _ in range(sockets)]
        all_read = asyncio.Event()

        def receive(each: socket.socket) -> None:
            read.append(len(each.recv(1)))
            if len(read) == sockets:
                all_read.set()

        async with asyncio.TaskGroup() as group:
            await group.create_task(work([], "red", 1, 100 * STEP_S))
            whose.set("red")
            for ours, theirs in pairs:
                loop.add_reader(ours, receive, ours)
                theirs.send(b"1")
            for _ in range(10 * AT_ONCE):
                group.create_task(work(order, "blue", 1, STEP_S))
            await all_read.wait()
        for ours, theirs in pairs:
            loop.remove_reader(ours)
            ours.close()
            theirs.close()

    runner.run(main())
    assert read == [1] * sockets
    assert len(order) == 10 * AT_ONCE
    assert len(told) > 10  # the loop has looked often
    assert sum(told) < 3 * sockets


def test_tenants_that_are_long_gone_take_no_memory(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_loop, "KNOWN_MAX", 8)
    order: list[str] = []

    async def main() -> None:
        for number in range(40):
            await asyncio.create_task(work(order, f"tenant-{number}", 1, 0))

    runner.run(main())
    loop = runner.get_loop()
    assert isinstance(loop, FairLoop)
    assert len(loop._ready._used_s) <= 9  # noqa: SLF001 - no other wants to know
    assert len(order) == 40
