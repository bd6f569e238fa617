"""Do for many at once what each of them asks for by itself.

    leaving = Gathering(remove_all)
    await leaving.do([item])        # in one call with what others want removed meanwhile

For what costs the same for one as for a hundred.  While one batch is done, the next one gathers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

T = TypeVar("T")


@dataclass(slots=True)
class _Batch(Generic[T]):
    items: list[T] = field(default_factory=list)
    done: bool = False


class Gathering(Generic[T]):
    """Does the same for many.

    Args:
        work: Does it for all that it is given; may be called again for what it was done for.
    """

    def __init__(self, work: Callable[[Sequence[T]], Awaitable[None]]) -> None:
        self._work = work
        self._next: _Batch[T] = _Batch()
        self._busy = asyncio.Lock()

    async def do(self, items: Sequence[T]) -> None:
        """Do it for `items`, together with those of others who wait.

        Of a batch that fails each has its own done once more, alone: one that cannot be done fails
        no other.

        Raises:
            Exception: Whatever `work` raises for these alone.
        """
        mine = self._next
        mine.items.extend(items)
        async with self._busy:
            if mine.done:
                return
            if mine is not self._next:  # it has failed, or who did it was cancelled
                await self._work(items)
                return
            self._next = _Batch()
            if len(mine.items) == len(items):
                await self._work(items)
                return
            try:
                await self._work(mine.items)
                mine.done = True
            except Exception:  # noqa: BLE001 - it is raised for whom it concerns
                await self._work(items)
