"""Work on one thing is done in turn; nobody waits for a turn that will not come."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict, NotFound
from forkd.service.turns import Turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    made = Turns()
    running = asyncio.ensure_future(made.run())
    yield made
    made.close(Conflict("over"))
    await asyncio.wait_for(running, 5)


async def test_work_is_done_in_the_order_in_which_it_was_asked_for(turns: Turns) -> None:
    done: list[int] = []

    async def work(number: int) -> int:
        await asyncio.sleep(0)
        done.append(number)
        return number

    results = await asyncio.gather(*(turns.ask(f"{n}", lambda n=n: work(n)) for n in range(5)))  # type: ignore[misc]

    assert results == done == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [NotFound("gone"), RuntimeError("a bug")])
async def test_an_exception_is_whose_turn_it_was_and_the_next_turn_comes(
    turns: Turns, error: Exception
) -> None:
    async def fail() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        await turns.ask("fail", fail)
    assert await turns.ask("sleep", lambda: asyncio.sleep(0, "next")) == "next"


async def test_what_nobody_waits_for_is_logged_if_it_fails(
    turns: Turns, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    turns.post("fail", fail)
    await turns.ask("sleep", lambda: asyncio.sleep(0))

    (record,) = caplog.records
    assert (record.getMessage(), record.__dict__["task"]) == ("task crashed", "fail")


async def test_who_leaves_before_the_turn_came_has_nothing_done(turns: Turns) -> None:
    done: list[str] = []

    async def note() -> None:
        done.append("x")

    async with turns.exclusive("block"):
        leaving = asyncio.ensure_future(turns.ask("note", note))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
    await turns.ask("sleep", lambda: asyncio.sleep(0))

    assert done == []


async def test_work_that_was_begun_is_done_even_if_its_caller_leaves(turns: Turns) -> None:
    began, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        await go_on.wait()
        done.set()

    leaving = asyncio.ensure_future(turns.ask("work", work))
    await began.wait()
    leaving.cancel()
    await asyncio.wait([leaving])
    go_on.set()

    await asyncio.wait_for(done.wait(), 5)


async def test_nothing_is_done_while_somebody_has_it_exclusively(turns: Turns) -> None:
    order: list[str] = []

    async def note() -> None:
        order.append("other")

    async with turns.exclusive("block"):
        waiting = asyncio.ensure_future(turns.ask("note", note))
        for _ in range(5):
            await asyncio.sleep(0)
        order.append("block")
    await waiting

    assert order == ["block", "other"]


async def test_closing_answers_everybody_who_waits_and_whoever_comes_later(turns: Turns) -> None:
    async with turns.exclusive("block"):
        waiting = [
            asyncio.ensure_future(turns.ask("x", lambda: asyncio.sleep(0))) for _ in range(3)
        ]
        await asyncio.sleep(0)
        turns.close(NotFound("no sandbox sb-1", sandbox="sb-1"))

        answers = await asyncio.gather(*waiting, return_exceptions=True)

    assert [str(each) for each in answers] == ["no sandbox sb-1"] * 3
    assert all(isinstance(each, NotFound) for each in answers)
    with pytest.raises(NotFound):
        await turns.ask("x", lambda: asyncio.sleep(0))
    with pytest.raises(NotFound):
        async with turns.exclusive("block"):
            pytest.fail("nobody owns it any more")
    turns.post("x", lambda: asyncio.sleep(0))


async def test_a_turn_that_closes_still_has_its_own_outcome(turns: Turns) -> None:
    async def last() -> str:
        turns.close(NotFound("gone"))
        return "done"

    assert await turns.ask("last", last) == "done"


async def test_an_owner_that_is_cancelled_leaves_nobody_waiting() -> None:
    turns = Turns()
    running = asyncio.ensure_future(turns.run())
    began = asyncio.Event()

    async def for_ever() -> None:
        began.set()
        await asyncio.Event().wait()

    asking = [asyncio.ensure_future(turns.ask("x", for_ever)) for _ in range(2)]
    await began.wait()
    running.cancel()

    answers = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 5)
    assert [str(each) for each in answers] == ["the daemon is stopping"] * 2
