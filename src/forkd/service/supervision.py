"""Run tasks that outlive each other's failures, and end the service when one that it needs fails.

    task = supervisor.run(TaskKind.FORK, fork(...), "3 of numpy")
    result = await task            # its result, or its exception, for every waiter

A task keeps its exception for whoever waits, whether we expected it or not; an exception that
nobody waits for is logged, once, with the id of the request that began the task.  Cancelling a
waiter does not cancel the task.  A task marked `vital` that fails ends the service:
`Supervisor.failure` says why from then on, `Supervisor.until_failed` returns, and whoever runs the
service ends the process, so that a service manager starts another.
"""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from forkd.errors import Conflict, ForkdError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator
    from types import TracebackType

T = TypeVar("T")

STOPPING = "the daemon is stopping"

_REPORTED = "_forkd_reported"
"""What an exception has that was logged before somebody came to wait for it."""

log = logging.getLogger(__name__)


class TaskKind(StrEnum):
    """What tasks there are; a test has one of each fail."""

    OWNER = "owner"
    FORK = "fork"
    BRANCH = "branch"
    DELETE = "delete"
    FINISH_PROMOTION = "finish promotion"
    BAKE = "bake"
    BUILD = "build"
    WRITE = "write"
    COMPACT = "compact"
    STOP_ZYGOTE = "stop zygote"
    JOURNAL = "journal"
    RESOLVER = "resolver"
    QUESTION = "question"
    PROXY = "proxy"
    PROXIED = "proxied"
    FILL = "fill"
    CLOCK = "clock"
    ANSWER = "answer"


class Task(Generic[T]):
    """A task that a supervisor runs; await it as often as there is need."""

    def __init__(self, task: asyncio.Task[T]) -> None:
        self._task = task
        self._waiters = 0

    def __await__(self) -> Generator[object, None, T]:
        return self._wait().__await__()

    @property
    def waited_for(self) -> bool:
        """Whether somebody waits now."""
        return self._waiters > 0

    def when_done(self, call: Callable[[], None]) -> None:
        """Have `call` called once the task has ended, however it ends."""
        self._task.add_done_callback(lambda _: call())

    async def cancel(self) -> None:
        """Cancel the task, and return when it has ended; its outcome is not raised."""
        self._task.cancel()
        await to_end(_ended(self._task))

    async def _wait(self) -> T:
        self._waiters += 1
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._task.cancelled() and current is not None and not current.cancelling():
                raise Conflict(STOPPING) from None  # the task was cancelled, not we
            raise
        finally:
            self._waiters -= 1


class Supervisor:
    """Starts tasks; on leaving its `async with` block all of them are cancelled and have ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._stopping = False
        self._failed = asyncio.Event()
        self.failure: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping = True
        ending = tuple(self._tasks)
        for task in ending:
            task.cancel()
        if ending:
            await to_end(asyncio.wait(ending))

    def run(
        self,
        kind: TaskKind,
        work: Coroutine[object, object, T],
        subject: str,
        *,
        vital: bool = False,
    ) -> Task[T]:
        """Start a task.

        Args:
            kind: What it does.
            work: What it does, in code.
            subject: To what, for the log.
            vital: Whether the service cannot go on if it fails.

        Raises:
            Conflict: The service is stopping.
        """
        if self._stopping:
            work.close()
            raise Conflict(STOPPING)
        # The only task of the service that has no group: it is in our set until it has ended.
        inner = asyncio.create_task(work, name=f"{kind} {subject}")
        task = Task(inner)
        self._tasks.add(inner)
        inner.add_done_callback(self._tasks.discard)
        inner.add_done_callback(lambda done: self._note_end(done, task, vital=vital))
        return task

    async def finish(
        self,
        kind: TaskKind,
        work: Coroutine[object, object, T],
        subject: str,
        *,
        undo: Callable[[T], Awaitable[None]],
    ) -> T:
        """Do `work` to its end, and undo it if the caller does not wait for its result.

        Raises:
            Conflict: The service is stopping.
            Exception: Whatever `work` raises.
        """
        task = self.run(kind, work, subject)
        try:
            return await task
        except asyncio.CancelledError:
            task.when_done(lambda: self._undo(task, undo, subject))
            raise

    async def until_failed(self) -> str:
        """Return why the service cannot go on, once it cannot."""
        await self._failed.wait()
        return self.failure or "a task of the service failed"

    def fail(self, reason: str) -> None:
        """Say that the service cannot go on; the first reason stays."""
        if self.failure is None:
            self.failure = reason
            log.critical("the service cannot go on", extra={"reason": reason})
        self._failed.set()

    def _undo(self, task: Task[T], undo: Callable[[T], Awaitable[None]], subject: str) -> None:
        if self._stopping:
            return  # what was made lives on, and the next start adopts it

        async def take_back() -> None:
            try:
                result = await task
            except Exception:  # noqa: BLE001 - it failed, was logged, and made nothing
                return
            await undo(result)

        self.run(TaskKind.DELETE, take_back(), f"what has no waiter: {subject}")

    def _note_end(self, inner: asyncio.Task[T], task: Task[T], *, vital: bool) -> None:
        """Log what has no waiter, and end the service if the task was vital."""
        error = None if inner.cancelled() else inner.exception()
        if error is not None and not task.waited_for:
            report(error, inner.get_name())
        if vital and error is not None and not self._stopping:
            self.fail(f"{inner.get_name()} failed: {error!r}")


def report(error: BaseException, name: str) -> None:
    """Log an error that nobody waits for: one that we know in a line, a bug with its traceback."""
    if isinstance(error, ForkdError):
        log.warning("task failed", extra={"task": name, "error": str(error), "code": error.code})
    else:
        log.error("task crashed", exc_info=error, extra={"task": name})
        setattr(error, _REPORTED, True)


def is_reported(error: BaseException) -> bool:
    """Whether a crash is in the log already, with its traceback."""
    return getattr(error, _REPORTED, False)


async def to_end(work: Awaitable[T]) -> T:
    """Do `work` to its end even if the caller is cancelled, which then takes effect.

    For what must not be left half-done: releasing, publishing.  If it fails then, that is logged,
    since nobody waits for it any more.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        if not task.cancelled() and (error := task.exception()) is not None:
            report(error, task.get_name())
        raise


async def _ended(task: asyncio.Task[T]) -> None:
    await asyncio.wait([task])
