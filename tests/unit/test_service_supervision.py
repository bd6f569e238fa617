"""A task's failure reaches who waits, or the log; only a vital one ends the service."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict, NotFound
from forkd.service.supervision import Supervisor, TaskKind, to_end

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def tasks() -> AsyncIterator[Supervisor]:
    async with Supervisor() as made:
        yield made


async def fail(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def test_every_waiter_gets_the_result(tasks: Supervisor) -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    task = tasks.run(TaskKind.FORK, work(), "x")

    assert tuple(await asyncio.gather(task, task)) == (7, 7)
    assert await task == 7


@pytest.mark.parametrize("error", [NotFound("gone"), RuntimeError("a bug")])
async def test_every_waiter_gets_the_exception_and_the_others_go_on(
    tasks: Supervisor, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    going_on = asyncio.Event()
    other = tasks.run(TaskKind.OWNER, going_on.wait(), "other", vital=True)
    task = tasks.run(TaskKind.FORK, fail(error), "x")

    first, second = await asyncio.gather(task, task, return_exceptions=True)

    assert (first, second) == (error, error)
    assert caplog.records == []
    going_on.set()
    assert await other is True
    assert tasks.failure is None


async def test_a_crash_that_nobody_waits_for_is_logged_once_with_its_traceback(
    tasks: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    ended = asyncio.Event()
    tasks.run(TaskKind.WRITE, fail(RuntimeError("a bug")), "x").when_done(ended.set)
    await ended.wait()

    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "task crashed")
    assert record.exc_info is not None
    assert record.__dict__["task"] == "write x"


async def test_an_error_of_ours_that_nobody_waits_for_is_one_line(
    tasks: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    ended = asyncio.Event()
    tasks.run(TaskKind.WRITE, fail(NotFound("gone")), "x").when_done(ended.set)
    await ended.wait()

    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)


async def test_a_waiter_that_leaves_does_not_end_the_task(tasks: Supervisor) -> None:
    go_on, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        done.set()

    task = tasks.run(TaskKind.FORK, work(), "x")
    waiter = asyncio.ensure_future(task._wait())  # noqa: SLF001 - a task to be cancelled
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait([waiter])

    go_on.set()
    await asyncio.wait_for(done.wait(), 5)


async def test_what_was_made_for_a_caller_that_left_is_undone(tasks: Supervisor) -> None:
    go_on, undone = asyncio.Event(), asyncio.Event()
    given: list[str] = []

    async def work() -> str:
        await go_on.wait()
        return "made"

    async def undo(made: str) -> None:
        given.append(made)
        undone.set()

    caller = asyncio.ensure_future(tasks.finish(TaskKind.FORK, work(), "x", undo=undo))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    assert given == []

    go_on.set()
    await asyncio.wait_for(undone.wait(), 5)
    assert given == ["made"]


async def test_a_vital_task_that_fails_ends_the_service_and_says_why(tasks: Supervisor) -> None:
    assert tasks.failure is None
    tasks.run(TaskKind.OWNER, fail(RuntimeError("a bug")), "sb-1", vital=True)

    why = await asyncio.wait_for(tasks.until_failed(), 5)

    assert why == tasks.failure == "owner sb-1 failed: RuntimeError('a bug')"


async def test_a_vital_task_that_ends_well_is_no_failure(tasks: Supervisor) -> None:
    await tasks.run(TaskKind.OWNER, asyncio.sleep(0), "sb-1", vital=True)

    assert tasks.failure is None


async def test_stopping_cancels_every_task_and_tells_who_waits() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with Supervisor() as tasks:
        task = tasks.run(TaskKind.BAKE, work(), "x", vital=True)
        waiter = asyncio.ensure_future(task._wait())  # noqa: SLF001 - somebody who waits
        await asyncio.sleep(0)

    assert ended.is_set()
    with pytest.raises(Conflict, match="stopping"):
        await waiter
    assert tasks.failure is None
    with pytest.raises(Conflict, match="stopping"):
        tasks.run(TaskKind.BAKE, work(), "x")


async def test_to_end_logs_what_fails_after_its_caller_was_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        raise Conflict("too late")

    caller = asyncio.ensure_future(to_end(work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    go_on.set()

    with pytest.raises(asyncio.CancelledError):
        await caller
    gc.collect()  # a task of which nobody has asked how it ended says so now
    assert [each.getMessage() for each in caplog.records] == ["task failed"]


async def test_to_end_outlives_every_cancellation_of_its_caller() -> None:
    go_on, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        done.set()

    caller = asyncio.ensure_future(to_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        caller.cancel()
    go_on.set()

    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done.is_set()
