"""Threads for work that takes long: unpacking, measuring, syncing files.

Forks, their leases and deletions have the other threads of the daemon, and never wait behind such
work.  Tenants share these threads, so that none waits for all that another has asked for.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, Self, TypeVar

from forkd.host import threads
from forkd.limits import SHORT_RETRY_S
from forkd.service.places import Places
from forkd.service.supervision import to_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.model.caller import Caller

T = TypeVar("T")

WORKERS = 4
"""How many such threads there are."""


class Workers:
    """Runs long work in threads of its own.

    Raises:
        CapacityError: The threads cannot be started.
    """

    def __init__(self) -> None:
        self._threads = threads.start(WORKERS, "forkd-work")
        self.places = Places("long tasks", WORKERS, SHORT_RETRY_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads, when what they do is done."""
        self._threads.shutdown()

    async def run(self, caller: Caller, work: Callable[[], T]) -> T:
        """Return what `work` returns, which blocks; waits until the caller may have a thread.

        Work that has begun is done to its end, even if nobody waits for it any more.
        """
        context = contextvars.copy_context()
        async with self.places.wait(caller):
            loop = asyncio.get_running_loop()
            return await to_end(loop.run_in_executor(self._threads, context.run, work))
