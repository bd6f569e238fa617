"""Watch a guest for times at which it is paused."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.engine.channel import deadline
from forkd.engine.frames import Kind
from forkd.engine.guest import ANSWER_TIMEOUT_S, answer
from forkd.engine.replies import Watched

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from forkd.engine.channel import Channel
    from forkd.engine.guest import Guest


@dataclass(frozen=True, slots=True)
class GuestWatch:
    """An agent that looks at its clock each millisecond."""

    channel: Channel

    async def end(self, *, at_least_s: float, timeout_s: float = ANSWER_TIMEOUT_S) -> float:
        """Return the longest time between two looks, in milliseconds; to be asked once.

        Args:
            at_least_s: How long it must have watched.
            timeout_s: How long to wait for the answer.

        Raises:
            EngineTimeout: It did not come.
            EngineExited: The machine is gone.
        """
        try:
            async with deadline(timeout_s, "the agent did not say what it saw"):
                request = {"op": "watched", "at_least_s": at_least_s}
                await self.channel.send_json(Kind.REQUEST, request)
                reply = Watched.read(answer(await self.channel.receive()), "watched")
        except BaseException:
            self.channel.close()  # an answer that is late would be taken for another's
            raise
        return reply.longest_s * 1e3


@contextlib.asynccontextmanager
async def watching(
    guest: Guest, for_s: float, *, timeout_s: float = ANSWER_TIMEOUT_S
) -> AsyncGenerator[GuestWatch, None]:
    """Have a guest watched within the block, for at most `for_s`.

    Raises:
        EngineTimeout: The agent did not begin within `timeout_s`.
        EngineExited: The machine is gone.
        ForkdError: The agent is too old to know how.
    """
    async with contextlib.AsyncExitStack() as stack:
        async with deadline(timeout_s, "the agent did not begin to watch"):
            operation = guest.operation("watch", {"for_s": for_s})
            channel = await stack.enter_async_context(operation)
            answer(await channel.receive())
        yield GuestWatch(channel)
