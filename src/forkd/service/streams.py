"""Work that tells how far it is: a task, seen as an iterator of its progress and its result."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from forkd.model.progress import Progress
    from forkd.service.supervision import Supervisor, TaskKind

T = TypeVar("T")

PROGRESS_WAITING_MAX = 1_000
"""Most steps that wait for a reader; later ones are dropped until it has read some."""


async def progress_of(
    tasks: Supervisor,
    kind: TaskKind,
    subject: str,
    work: Callable[[Callable[[Progress], None]], Coroutine[object, object, T]],
) -> AsyncGenerator[Progress | T, None]:
    """Do `work`, which is given what to call with each step; yield the steps and its result.

    Closing the iterator before the result cancels the work and waits until it has ended.

    Raises:
        Conflict: The service is stopping.
        Exception: Whatever `work` raises.
    """
    steps: asyncio.Queue[Progress | None] = asyncio.Queue()

    def tell(step: Progress) -> None:
        if steps.qsize() < PROGRESS_WAITING_MAX:
            steps.put_nowait(step)

    task = tasks.run(kind, work(tell), subject)
    task.when_done(lambda: steps.put_nowait(None))
    try:
        while (step := await steps.get()) is not None:
            yield step
        yield await task
    finally:
        await task.cancel()
