"""Own every task of the service, so that none outlives it and none is lost.

The service starts and stops from outside of any `async with`, so one task holds the
group that all others are in.  That task is the only one started without a group.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

from forkd.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

log = logging.getLogger(__name__)


class TaskOwner:
    """Starts tasks, and ends them all with `stop`."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._root: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Begin to take tasks."""
        ready = asyncio.Event()
        self._stopping.clear()
        self._root = asyncio.create_task(self._hold(ready), name="forkd tasks")
        await ready.wait()

    async def stop(self) -> None:
        """Cancel every task and wait until all have ended; idempotent."""
        self._group = None
        self._stopping.set()
        root, self._root = self._root, None
        if root is not None:
            await root

    def spawn(self, work: Coroutine[object, object, T], name: str) -> asyncio.Task[T]:
        """Start a task whose errors, beside cancellation, are bugs and end the service.

        Raises:
            Conflict: The service does not run.
        """
        if self._group is None:
            work.close()
            raise Conflict("the service does not run")
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _hold(self, ready: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                ready.set()
                await self._stopping.wait()
                for task in self._tasks:
                    task.cancel()
        except BaseExceptionGroup:
            log.critical("a task of the service crashed; restart it", exc_info=True)
            raise
        finally:
            self._group = None


async def to_end(work: Coroutine[object, object, T]) -> T:
    """Do `work` to its end even if the caller is cancelled, which then takes effect.

    For what must not be left half-done: giving back, publishing.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
