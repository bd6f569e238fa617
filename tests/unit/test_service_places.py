"""Places are shared by tenants: one more is refused, or waits until it may have one."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from forkd.errors import CapacityError
from forkd.service.places import Places
from forkd.service.workers import WORKERS, Workers
from tests.support.callers import CALLER, tenant

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.model.caller import Caller

DEADLINE_S = 10.0


RED, BLUE = tenant("red"), tenant("blue")


def test_a_tenant_with_its_share_is_told_so_and_the_next_one_finds_a_place() -> None:
    places = Places("bakes", 4, 10)
    with ExitStack() as taken:
        taken.enter_context(places.take(RED))
        taken.enter_context(places.take(RED))
        with pytest.raises(CapacityError) as refused, places.take(RED):
            pass
        taken.enter_context(places.take(BLUE))
        taken.enter_context(places.take(CALLER))
        with (
            pytest.raises(CapacityError, match="this host has at most 4 at once"),
            places.take(BLUE),
        ):
            pass

    assert str(refused.value) == (
        "one more of bakes was asked for; tenant red has 2, its share of the 4 that this host has "
        "at once: try again in 10 s"
    )
    context = {"asked": 1, "limit": 4, "used": 2, "retry_after_s": 10}
    assert refused.value.context == context
    assert places.used == 0


def test_an_administrator_has_all_places() -> None:
    places = Places("bakes", 3, 10)
    with ExitStack() as taken:
        for _ in range(3):
            taken.enter_context(places.take(CALLER))
        with pytest.raises(CapacityError, match="and 3 are in use"), places.take(CALLER):
            pass


async def test_who_waits_for_its_share_does_not_hold_up_others() -> None:
    places, order = Places("bakes", 2, 10), asyncio.Queue[str]()
    go = {name: asyncio.Event() for name in ("red 1", "red 2", "blue")}

    async def work(name: str, caller: Caller) -> None:
        async with places.wait(caller):
            order.put_nowait(name)
            await go[name].wait()

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(work("red 1", RED))
        group.create_task(work("red 2", RED))
        group.create_task(work("blue", BLUE))
        assert [await order.get(), await order.get()] == ["red 1", "blue"]
        assert not places.has_room(RED)
        go["red 1"].set()
        assert await order.get() == "red 2"
        for each in go.values():
            each.set()
    assert places.used == 0


async def test_who_stops_waiting_takes_no_place() -> None:
    places = Places("bakes", 1, 10)

    async def wait() -> None:
        async with places.wait(RED):
            raise AssertionError

    with places.take(BLUE):
        left, granted = asyncio.ensure_future(wait()), asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
    granted.cancel()  # in the same turn of the event loop as it was given the place
    await asyncio.wait([granted])

    assert (left.cancelled(), granted.cancelled(), places.used) == (True, True, 0)


async def test_a_tenants_long_work_leaves_threads_to_others() -> None:
    go, begun = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        begun.release()
        go.wait(DEADLINE_S)

    def tell() -> str:
        return threading.current_thread().name

    with Workers() as workers:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            works: list[Callable[[], None]] = [wait] * (4 * WORKERS)
            waiting = [group.create_task(workers.run(RED, each)) for each in works]
            for _ in range(WORKERS // 2):
                assert await asyncio.to_thread(begun.acquire, timeout=DEADLINE_S)
            assert (await workers.run(BLUE, tell)).startswith("forkd-work")
            assert workers.places.used == WORKERS // 2
            for each in waiting[WORKERS // 2 + 1 :]:
                each.cancel()
            go.set()
        assert workers.places.used == 0
