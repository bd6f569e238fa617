"""A program that runs in a sandbox, with its streams attached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TypeVar

from pydantic import BaseModel, ValidationError

from forkd.errors import TransportError
from forkd.sdk._errors import from_body
from forkd.sdk._requests import build
from forkd.sdk._results import Output
from forkd.wire.v2 import (
    ErrorBody,
    ExecControl,
    ExecExit,
    ExecStart,
    ExecStarted,
    Kind,
    TerminalSize,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from forkd.sdk._async.http import AsyncHttp
    from forkd.sdk._transport import AsyncSocket

M = TypeVar("M", bound=BaseModel)

STDIN_CHUNK_BYTES = 64 * 1024
"""Input is cut into messages of this size, so that output is never stuck behind much of it."""


class AsyncProcess:
    r"""A program in a guest: an iterator of its `Output`, and a context manager.

        async for output in sandbox.exec_stream(["make", "test"]):
            print(output.data)

    The loop starts the program, and lets go of it at its end.  To write to the program, enter it:

        async with sandbox.exec_stream(["sort"], stdin=True) as process:
            await process.write(b"b\na\n")
            await process.close_stdin()
            async for output in process:
                print(output.data)
        print(process.exit.exit_code)

    Leaving the context, or the loop, ends the program if it still runs.

    Attributes:
        pid: Its process id in the guest, once it is started.
        exit: How it ended, once the iteration is over.
    """

    def __init__(self, http: AsyncHttp, path: str, request: ExecStart) -> None:
        self._http = http
        self._path = path
        self._request = request
        self._socket: AsyncSocket | None = None
        self.pid: int | None = None
        self.exit: ExecExit | None = None

    async def __aenter__(self) -> Self:
        self._socket = await self._http.socket(self._path)
        try:
            await self._send(Kind.REQUEST, self._request.model_dump_json().encode())
            kind, payload = await self._receive()
            self._expect(kind, Kind.EVENT)
            self.pid = answered(ExecStarted, payload).pid
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Output]:
        return self._alone() if self._socket is None else self

    async def _alone(self) -> AsyncIterator[Output]:
        """Yield the output of a program that nobody has entered."""
        async with self:
            async for output in self:
                yield output

    async def __anext__(self) -> Output:
        """Return what the program writes next.

        Raises:
            EngineExited: The sandbox ended before the program did.
            TransportError: The connection broke.
        """
        if self.exit is not None:
            raise StopAsyncIteration
        kind, payload = await self._receive()
        if kind is Kind.STDOUT:
            return Output("stdout", payload)
        if kind is Kind.STDERR:
            return Output("stderr", payload)
        self._expect(kind, Kind.REPLY)
        self.exit = answered(ExecExit, payload)
        raise StopAsyncIteration

    async def wait(self) -> ExecExit:
        """Drop all further output, and return how the program ended; starts it if need be."""
        async for _ in self:
            pass
        if self.exit is None:
            raise TransportError("the program's end was not told")
        return self.exit

    async def write(self, data: bytes) -> None:
        """Write to the program's standard input; waits while it has no room."""
        for start in range(0, len(data), STDIN_CHUNK_BYTES):
            await self._send(Kind.STDIN, data[start : start + STDIN_CHUNK_BYTES])

    async def close_stdin(self) -> None:
        """Let the program see the end of its standard input."""
        await self._send(Kind.STDIN_EOF)

    async def send_signal(self, signal: int) -> None:
        """Send a signal to the program and what it started."""
        await self._control(build(ExecControl, signal=signal))

    async def resize(self, rows: int, columns: int) -> None:
        """Tell the program that its terminal has another size."""
        size = build(TerminalSize, rows=rows, columns=columns)
        await self._control(build(ExecControl, resize=size))

    async def aclose(self) -> None:
        """Let go; the guest kills the program if it still runs.  Idempotent."""
        if self._socket is not None:
            await self._socket.aclose()

    async def _control(self, order: ExecControl) -> None:
        await self._send(Kind.CONTROL, order.model_dump_json(exclude_none=True).encode())

    async def _send(self, kind: Kind, payload: bytes = b"") -> None:
        await self._open().send(bytes([kind]) + payload)

    async def _receive(self) -> tuple[Kind, bytes]:
        return await received(self._open())

    def _open(self) -> AsyncSocket:
        if self._socket is None:
            raise TransportError(
                "the program was not started: enter its context, or iterate, first"
            )
        return self._socket

    @staticmethod
    def _expect(kind: Kind, expected: Kind) -> None:
        if kind is not expected:
            raise TransportError(f"{kind.name} came where {expected.name} belongs")


async def received(socket: AsyncSocket) -> tuple[Kind, bytes]:
    """Return the next message; an ERROR is raised."""
    message = await socket.receive()
    try:
        kind, payload = Kind(message[0]), message[1:]
    except (ValueError, IndexError) as error:
        raise TransportError("a message of this daemon makes no sense to us") from error
    if kind is Kind.ERROR:
        raise from_body(answered(ErrorBody, payload))
    return kind, payload


def answered(kind: type[M], payload: bytes) -> M:
    """Return what the payload of a message says.

    Raises:
        TransportError: It is none of that kind.
    """
    try:
        return kind.model_validate_json(payload)
    except ValidationError as error:
        raise TransportError(f"this daemon's answer makes no sense to us: {error}") from error
