"""Work that goes on at the same time, written by hand in both flavours, as `_transport`.

The asynchronous flavour has tasks, the synchronous one threads.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self, TypeVar

from forkd.errors import ForkdError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

S = TypeVar("S")
R = TypeVar("R")


async def async_map(
    function: Callable[[S], Awaitable[R]], items: Sequence[S], most: int
) -> list[R | Exception]:
    """Return what `function` gives for each item, or raises, in order; `most` at a time."""
    places = asyncio.Semaphore(most)

    async def one(item: S) -> R | Exception:
        async with places:
            try:
                return await function(item)
            except Exception as error:  # noqa: BLE001 - handed to the caller
                return error

    return list(await asyncio.gather(*map(one, items)))


def sync_map(function: Callable[[S], R], items: Sequence[S], most: int) -> list[R | Exception]:
    """Return what `function` gives for each item, as `async_map`."""

    def one(item: S) -> R | Exception:
        try:
            return function(item)
        except Exception as error:  # noqa: BLE001 - handed to the caller
            return error

    if len(items) <= 1:
        return [one(each) for each in items]
    pool = ThreadPoolExecutor(min(most, len(items)), thread_name_prefix="forkd")
    try:
        outcomes = list(pool.map(one, items))
    except BaseException:  # we are interrupted: what has begun goes on, nothing else begins
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    return outcomes


async def async_told(callback: Callable[[R], object], piece: R) -> None:
    """Call a function with what came; what it returns is awaited if it can be."""
    done = callback(piece)
    if inspect.isawaitable(done):
        await done


def sync_told(callback: Callable[[R], object], piece: R) -> None:
    """Call a function with what came."""
    callback(piece)


class AsyncBeside:
    """Work beside a block; its errors of ours are dropped, and it has ended when the block has."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Begin."""

        async def done() -> None:
            try:
                await work()
            except ForkdError:
                return

        self._task = asyncio.create_task(done())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class Beside:
    """Work beside a block, as `AsyncBeside`; it must end by itself once the block is left."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin."""

        def done() -> None:
            try:
                work()
            except ForkdError:
                return

        self._thread = threading.Thread(target=done, name="forkd-stdin", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._thread.join()
