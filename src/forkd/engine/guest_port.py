"""Connections to programs that listen in a guest."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from forkd.engine.channel import deadline
from forkd.engine.frames import Kind
from forkd.engine.guest import ANSWER_TIMEOUT_S, answer
from forkd.engine.replies import Connected
from forkd.errors import Conflict, EngineError
from forkd.limits import STDIN_CHUNK_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from forkd.engine.channel import Channel
    from forkd.engine.guest import Guest


class GuestPort:
    """A connection to a program; `forkd.service.api_streams.PortSession` describes it."""

    def __init__(self, channel: Channel, operation: contextlib.AsyncExitStack) -> None:
        self._channel = channel
        self._operation = operation
        self._sends = True

    @classmethod
    async def open(
        cls, guest: Guest, port: int, around: contextlib.AbstractContextManager[None]
    ) -> Self:
        """Connect to the program that listens on a port.

        Args:
            guest: Where.
            port: Which.
            around: Entered before, and left when the session is closed.

        Raises:
            Conflict: Nothing listens there, or the agent is too old to connect.
            Busy: The program accepts no connection now.
            EngineTimeout: The agent did not answer.
            EngineExited: The machine is gone.
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(around)
            async with deadline(ANSWER_TIMEOUT_S, "the agent did not connect"):
                operation = guest.operation("connect", {"port": port})
                channel = await stack.enter_async_context(operation)
                first = await channel.receive()
            if first.kind is not Kind.EVENT:
                answer(first)
                raise EngineError("an agent ended a connection that it never made")
            Connected.read(first.members(), "connect")
            return cls(channel, stack.pop_all())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield what the program sends, and once `b""` for its end; ends when both have ended.

        Raises:
            GuestError: The program has reset the connection.
            EngineExited: The machine ended.
        """
        has_ended = False
        while True:
            frame = await self._channel.receive()
            if frame.kind is Kind.DATA and not has_ended:
                if frame.payload:
                    yield frame.payload
            elif frame.kind is Kind.DATA_EOF and not has_ended:
                has_ended = True
                yield b""
            else:
                answer(frame)
                return

    async def send(self, data: bytes) -> None:
        """Send bytes, in pieces; see the API."""
        if not self._sends:
            raise Conflict("the end of what is sent was sent already")
        for start in range(0, len(data), STDIN_CHUNK_BYTES_MAX):
            await self._channel.send(Kind.DATA, data[start : start + STDIN_CHUNK_BYTES_MAX])

    async def send_end(self) -> None:
        """Send no more; see the API."""
        if self._sends:
            self._sends = False
            await self._channel.send(Kind.DATA_EOF)

    async def aclose(self) -> None:
        """Let go of the connection; see the API."""
        self._channel.close()  # what the agent has not read would confuse the next operation
        await self._operation.aclose()
