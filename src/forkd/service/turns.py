"""Work that one task does, one piece after the other: how a sandbox has one owner.

Whoever wants something done asks for a turn and waits for its outcome, exception included; who
leaves before does not stop it.  A turn can also be borrowed for as long as a block takes:

    async with turns.exclusive():
        ...                         # nothing else is done meanwhile

Once closed, whoever waits, and whoever asks from then on, gets the reason as an exception: nobody
waits for what no longer exists.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from forkd.errors import Conflict
from forkd.service.supervision import STOPPING, report
from forkd.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from forkd.errors import ForkdError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Turn:
    """One piece of work; `outcome` is None if nobody waits for it, `span` what it is a part of."""

    name: str
    work: Callable[[], Awaitable[object]]
    outcome: asyncio.Future[object] | None
    span: object = None

    async def take(self) -> None:
        if self.outcome is not None and self.outcome.done():
            return  # who asked has left before it began
        try:
            with tracing.within(self.span):  # not that of the request which made the owner
                result = await self.work()
        except Exception as error:  # noqa: BLE001 - it belongs to who asked, whatever it is
            self.fail(error)
        else:
            if self.outcome is not None and not self.outcome.done():
                self.outcome.set_result(result)

    def fail(self, error: Exception) -> None:
        if self.outcome is None:
            report(error, self.name)
        elif not self.outcome.done():
            self.outcome.set_exception(error)

    def refuse(self, reason: ForkdError) -> None:
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_exception(_again(reason))


class Turns:
    """A queue of work and the loop that does it; `run` is the task of whoever owns it."""

    def __init__(self) -> None:
        self._waiting: deque[_Turn] = deque()
        self._more = asyncio.Event()
        self._closed: ForkdError | None = None

    async def run(self) -> None:
        """Do what is asked for until `close`; the owner's task."""
        turn: _Turn | None = None
        try:
            while self._closed is None:
                await self._more.wait()
                self._more.clear()
                while self._waiting and self._closed is None:
                    turn = self._waiting.popleft()
                    await turn.take()
        finally:
            self.close(Conflict(STOPPING))
            if turn is not None:
                turn.refuse(Conflict(STOPPING))  # nothing, unless it was interrupted

    async def ask(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """Have `work` done in turn, and return its result.

        Raises:
            ForkdError: The reason of `close`.
            Exception: Whatever `work` raises.
        """
        outcome: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._put(_Turn(name, work, outcome, tracing.here()))
        return cast("T", await outcome)

    def post(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        """Have `work` done in turn; nobody waits, so what it raises is logged.

        After `close` it is not done.
        """
        if self._closed is None:
            self._put(_Turn(name, work, None))

    @contextlib.asynccontextmanager
    async def exclusive(self, name: str) -> AsyncGenerator[None, None]:
        """Have nothing done within the block, which must end in a bounded time.

        Raises:
            ForkdError: The reason of `close`.
        """
        granted: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        released = asyncio.Event()

        async def lend() -> None:
            if not granted.done():
                granted.set_result(None)
                await released.wait()

        try:
            self._put(_Turn(name, lend, granted))
            await granted
            yield
        finally:
            released.set()

    def close(self, reason: ForkdError) -> None:
        """Do nothing more; whoever waits gets `reason`.  The first reason stays."""
        if self._closed is not None:
            return
        self._closed = reason
        self._more.set()
        while self._waiting:
            self._waiting.popleft().refuse(reason)

    def _put(self, turn: _Turn) -> None:
        if self._closed is not None:
            raise _again(self._closed)
        self._waiting.append(turn)
        self._more.set()


def _again(error: ForkdError) -> ForkdError:
    """Return an error like another, with a traceback of its own."""
    return type(error)(str(error), **error.context)
