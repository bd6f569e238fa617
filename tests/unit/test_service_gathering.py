"""What is asked for while a batch is done is the next batch; who fails fails alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
from forkd.service.gathering import Gathering

if TYPE_CHECKING:
    from collections.abc import Sequence


class Work:
    """Notes what it is asked for, and does so many batches as it may."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, ...]] = []
        self.began: asyncio.Queue[None] = asyncio.Queue()
        self.refused: set[int] = set()
        self._may = asyncio.Semaphore(0)

    def may(self, batches: int) -> None:
        for _ in range(batches):
            self._may.release()

    async def __call__(self, items: Sequence[int]) -> None:
        self.batches.append(tuple(items))
        self.began.put_nowait(None)
        await self._may.acquire()
        if self.refused.intersection(items):
            raise HostError("as asked")


@pytest.fixture
async def work() -> Work:
    return Work()


async def start(work: Work, *asked: int) -> list[asyncio.Task[None]]:
    """Ask for each; the first is being done, and the others wait, when this returns."""
    gathering = Gathering(work)
    tasks = [asyncio.create_task(gathering.do([asked[0]]))]
    await work.began.get()
    tasks += [asyncio.create_task(gathering.do([each])) for each in asked[1:]]
    await asyncio.sleep(0)
    return tasks


async def test_those_who_wait_are_done_at_once(work: Work) -> None:
    tasks = await start(work, 1, 2, 3, 4)

    work.may(2)
    await asyncio.gather(*tasks)

    assert work.batches == [(1,), (2, 3, 4)]


async def test_one_that_cannot_be_done_fails_no_other(work: Work) -> None:
    tasks = await start(work, 1, 2, 3, 4)
    work.refused = {3}

    work.may(5)
    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert [isinstance(each, HostError) for each in results] == [False, False, True, False]
    assert work.batches[:2] == [(1,), (2, 3, 4)]


async def test_one_who_is_cancelled_leaves_the_others_to_be_done(work: Work) -> None:
    tasks = await start(work, 1, 2, 3)
    work.may(1)
    await tasks[0]
    await work.began.get()
    assert work.batches[1] == (2, 3)

    tasks[1].cancel()
    work.may(1)
    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(each) for each in results] == [type(None), asyncio.CancelledError, type(None)]
    assert work.batches[2:] == [(3,)]


async def test_one_alone_that_fails_is_tried_once(work: Work) -> None:
    work.may(2)
    work.refused = {1}
    gathering = Gathering(work)

    with pytest.raises(HostError):
        await gathering.do([1])
    await gathering.do([2])

    assert work.batches == [(1,), (2,)]
