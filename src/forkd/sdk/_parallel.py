"""Work that goes on at the same time, written by hand in both flavours, as `_transport`.

The asynchronous flavour has tasks, the synchronous one threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self, TypeVar

from forkd.errors import ForkdError, TransportError
from forkd.sdk._archive import unpack_to

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
    from os import PathLike
    from types import TracebackType

    from forkd.sdk._archive import Copied

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


async def async_aside(work: Callable[[], R]) -> R:
    """Do work that reads files of this host, in another thread."""
    return await asyncio.to_thread(work)


def sync_aside(work: Callable[[], R]) -> R:
    """Do work that reads files of this host."""
    return work()


@contextlib.asynccontextmanager
async def async_apart(steps: Generator[R, None, None]) -> AsyncIterator[AsyncIterator[R]]:
    """Give what `steps` yields, which blocks: each step is in another thread.

    `steps` is closed when the block is left.  The step under way then ends first, because a
    thread cannot be interrupted.
    """
    running: asyncio.Task[R | None] | None = None

    async def each() -> AsyncIterator[R]:
        nonlocal running
        while True:
            running = asyncio.create_task(asyncio.to_thread(next, steps, None))
            step = await asyncio.shield(running)
            if step is None:
                return
            yield step

    try:
        yield each()
    finally:
        if running is not None:
            await asyncio.gather(running, return_exceptions=True)
        await asyncio.to_thread(steps.close)


@contextlib.contextmanager
def sync_apart(steps: Generator[R, None, None]) -> Iterator[Iterator[R]]:
    """Give what `steps` yields; it is closed when the block is left."""
    with contextlib.closing(steps):
        yield steps


async def async_told(callback: Callable[[R], object], piece: R) -> None:
    """Call a function with what came; what it returns is awaited if it can be."""
    done = callback(piece)
    if inspect.isawaitable(done):
        await done


def sync_told(callback: Callable[[R], object], piece: R) -> None:
    """Call a function with what came."""
    callback(piece)


async def async_unpacked(
    pieces: AsyncIterator[bytes], target: str | PathLike[str], copied: Copied, *, exact: bool
) -> None:
    """Make what an archive has at `target`; files are written in another thread."""
    loop = asyncio.get_running_loop()
    asked: Future[bytes | None] | None = None
    is_over = False
    # A piece can arrive, and the copy be cancelled, before the thread knows what it has asked for.
    asking = threading.Lock()

    async def piece() -> bytes | None:
        return await anext(pieces, None)

    def one_by_one() -> Iterator[bytes]:
        nonlocal asked
        while True:
            with asking:
                if is_over:
                    raise TransportError("the copy was cancelled")
                asked = asyncio.run_coroutine_threadsafe(piece(), loop)
            if (data := asked.result()) is None:
                return
            yield data

    def work() -> None:
        unpack_to(one_by_one(), target, copied, exact=exact)

    thread = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(thread)
    except asyncio.CancelledError:  # nobody reads `pieces` once we have returned
        with asking:
            is_over = True
            if asked is not None:
                asked.cancel()
        await asyncio.gather(thread, return_exceptions=True)
        raise


def sync_unpacked(
    pieces: Iterator[bytes], target: str | PathLike[str], copied: Copied, *, exact: bool
) -> None:
    """Make what an archive has at `target`."""
    unpack_to(pieces, target, copied, exact=exact)


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
