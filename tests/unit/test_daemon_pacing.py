"""Requests of one tenant begin one after the other, and leave time to those of others."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING

from forkd.daemon.pacing import Pace
from tests.support.callers import CALLER, tenant

if TYPE_CHECKING:
    from forkd.model.caller import Caller

RED, BLUE = tenant("red"), tenant("blue")

STEP_S = 0.02


async def test_who_comes_after_many_of_a_tenant_does_not_wait_for_all_of_them() -> None:
    pace, order = Pace(), list[str]()

    async def ask(caller: Caller) -> None:
        await pace.begin(caller)
        order.append(str(caller.principal))

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for caller in (*[RED] * 100, BLUE, CALLER):
            group.create_task(ask(caller))

    red = RED.principal
    assert order[:3] == [red, BLUE.principal, CALLER.principal]
    assert order[3:] == [red] * 99


async def test_a_tenant_leaves_half_of_the_time_to_others_that_ask() -> None:
    pace, began_s = Pace(), list[float]()

    async def ask() -> None:
        await pace.begin(RED)
        began_s.append(time.monotonic())
        time.sleep(STEP_S)  # noqa: ASYNC251 - keeps the event loop, as parsing does

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        await pace.begin(BLUE)
        for _ in range(3):
            group.create_task(ask())

    gaps_s = [after - before for before, after in itertools.pairwise(began_s)]
    assert len(gaps_s) == 2
    assert min(gaps_s) >= 1.5 * STEP_S


async def test_who_leaves_before_its_turn_holds_up_nobody() -> None:
    pace = Pace()
    async with asyncio.timeout(10):
        first, leaving, last = (asyncio.ensure_future(pace.begin(RED)) for _ in range(3))
        await asyncio.sleep(0)  # all have asked
        leaving.cancel()
        await asyncio.gather(first, last)
        await asyncio.wait([leaving])

    assert leaving.cancelled()
