"""Work on many sandboxes goes on at the same time, as much of it as may, and not more."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import TransportError
from forkd.sdk._archive import Copied, pack
from forkd.sdk._parallel import AsyncBeside, Beside, async_map, async_unpacked, sync_map

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

DEADLINE_S = 30.0


def test_as_many_threads_work_as_may() -> None:
    meeting = threading.Barrier(3)

    def meet(number: int) -> int:
        meeting.wait(DEADLINE_S)
        return number

    assert sync_map(meet, range(9), 3) == list(range(9))


def test_not_more_threads_work_than_may() -> None:
    meeting = threading.Barrier(3)

    def meet(_: int) -> None:
        meeting.wait(0.1)

    outcomes = sync_map(meet, range(2), 2)

    assert [type(each) for each in outcomes] == [threading.BrokenBarrierError] * 2


async def test_as_many_tasks_work_as_may_and_not_more() -> None:
    working, most = 0, 0
    three = asyncio.Event()

    async def count(number: int) -> int:
        nonlocal working, most
        working += 1
        most = max(most, working)
        if working == 3:
            three.set()
        await asyncio.wait_for(three.wait(), DEADLINE_S)
        await asyncio.sleep(0)
        working -= 1
        return number

    assert await async_map(count, range(9), 3) == list(range(9))
    assert most == 3


def test_an_error_is_an_outcome_and_an_interrupt_is_not() -> None:
    def fail(number: int) -> int:
        if number == 1:
            raise ValueError("one")
        return number

    zero, one, two = sync_map(fail, range(3), 3)
    assert (zero, str(one), two) == (0, "one", 2)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync_map(interrupt, range(3), 3)


async def test_an_error_of_a_task_is_an_outcome() -> None:
    async def fail(number: int) -> int:
        if number == 1:
            raise ValueError("one")
        return number

    zero, one, two = await async_map(fail, range(3), 3)
    assert (zero, str(one), two) == (0, "one", 2)


def test_work_beside_a_block_is_done_when_the_block_is() -> None:
    begun, left = threading.Event(), threading.Event()
    done = []

    def work() -> None:
        begun.set()
        assert left.wait(DEADLINE_S)
        done.append(True)
        raise TransportError("dropped")

    with Beside() as beside:
        beside.start(work)
        assert begun.wait(DEADLINE_S)
        assert done == []
        left.set()

    assert done == [True]


async def test_a_task_beside_a_block_is_cancelled_at_its_end() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with AsyncBeside() as beside:
        beside.start(work)
        await asyncio.wait_for(begun.wait(), DEADLINE_S)

    assert ended.is_set()


async def test_a_copy_that_is_cancelled_has_ended_when_that_is_known(tmp_path: Path) -> None:
    """Its thread would else write on, or wait for ever for the next piece."""
    begun = asyncio.Event()
    copied = Copied()
    archive = b"".join(pack(_folder(tmp_path / "from"), Copied(), name=None, exact=False))

    async def pieces() -> AsyncIterator[bytes]:
        yield archive[:-1024]
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(async_unpacked(pieces(), tmp_path / "to", copied, exact=False))
    await begun.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert copied.files == 1
    assert (tmp_path / "to/file").read_text() == "x"


async def test_a_copy_that_is_cancelled_while_its_thread_asks_for_a_piece_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled = asyncio.Event(), threading.Event()
    ask = asyncio.run_coroutine_threadsafe

    async def pieces() -> AsyncIterator[bytes]:
        begun.set()
        await asyncio.Event().wait()
        yield b""

    def asked_slowly(coroutine: Any, loop: asyncio.AbstractEventLoop) -> Any:  # noqa: ANN401
        asked = ask(coroutine, loop)
        assert cancelled.wait(DEADLINE_S)
        return asked

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", asked_slowly)
    task = asyncio.create_task(async_unpacked(pieces(), tmp_path / "to", Copied(), exact=False))
    await begun.wait()
    task.cancel()
    cancelled.set()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(task), DEADLINE_S)


def _folder(path: Path) -> Path:
    path.mkdir()
    (path / "file").write_text("x")
    return path
