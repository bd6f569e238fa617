"""A connection to a program that listens in a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from forkd.errors import TransportError

if TYPE_CHECKING:
    from types import TracebackType

    from forkd.sdk._async.http import AsyncHttp
    from forkd.sdk._transport import AsyncSocket

CHUNK_BYTES = 64 * 1024
"""What is sent is cut into messages of this size."""


class AsyncPort:
    r"""A connection to a program in a sandbox: a context manager, and an iterator of bytes.

        async with sandbox.connect_port(8000) as port:
            await port.send(b"GET / HTTP/1.0\r\n\r\n")
            async for data in port:
                print(data)

    Entering it connects.  Leaving it before both sides have ended resets the connection.
    """

    def __init__(self, http: AsyncHttp, path: str) -> None:
        self._http = http
        self._path = path
        self._socket: AsyncSocket | None = None
        self._has_ended = False

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            Conflict: Nothing listens on the port, or the sandbox does not run.
            Busy: The sandbox has too many connections to its ports.
        """
        self._socket = await self._http.socket(self._path)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Return what the program sends next; the iteration ends when it has ended that."""
        data = await self.receive()
        if not data:
            raise StopAsyncIteration
        return data

    async def send(self, data: bytes) -> None:
        """Send bytes to the program; waits while it has no room.

        Raises:
            TransportError: The connection broke.
        """
        for start in range(0, len(data), CHUNK_BYTES):
            await self._open().send(data[start : start + CHUNK_BYTES])

    async def send_end(self) -> None:
        """Let the program see the end of what is sent."""
        await self._open().send(b"")

    async def receive(self) -> bytes:
        """Return what the program sends next; nothing when it has ended that.

        Raises:
            TransportError: The connection broke.
        """
        if self._has_ended:
            return b""
        data = await self._open().receive()
        self._has_ended = not data
        return data

    async def aclose(self) -> None:
        """Let go.  Idempotent."""
        if self._socket is not None:
            await self._socket.aclose()

    def _open(self) -> AsyncSocket:
        if self._socket is None:
            raise TransportError("the port was not connected: enter its context first")
        return self._socket
