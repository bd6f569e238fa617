"""Commands in a guest, with their streams."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NoReturn, Self

from forkd.engine.channel import deadline
from forkd.engine.frames import Kind
from forkd.engine.guest import ANSWER_TIMEOUT_S, answer
from forkd.engine.replies import ExecEnded, ExecStarted
from forkd.errors import Conflict, EngineError, NotFound
from forkd.limits import STDIN_CHUNK_BYTES_MAX
from forkd.model.exec import Exited, Started, Stderr, Stdout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from forkd.engine.channel import Channel
    from forkd.engine.frames import Frame
    from forkd.engine.guest import Guest
    from forkd.model.exec import ExecEvent, ExecRequest, TtySize
    from forkd.model.json import JsonObject, JsonValue


class GuestExec:
    """A command that runs in a guest; `forkd.service.api_streams.ExecSession` describes it."""

    def __init__(
        self,
        channel: Channel,
        operation: contextlib.AsyncExitStack,
        started: Started,
        request: ExecRequest,
    ) -> None:
        self._channel = channel
        self._operation = operation
        self._started = started
        self._stdin_open = self._takes_input = request.stdin
        self._has_tty = request.tty is not None
        self._over = False

    @classmethod
    async def start(
        cls,
        guest: Guest,
        request: ExecRequest,
        around: contextlib.AbstractContextManager[None] | None = None,
    ) -> Self:
        """Start a command; returns once the agent has accepted it.

        Args:
            guest: Where.
            request: Which.
            around: Entered before it starts, and left when the session is closed.

        Raises:
            EngineTimeout: The agent did not answer.
            EngineExited: The machine is gone.
            NotFound: There is no such program; it is named in the context.
            ForkdError: The agent refused; `forkd.engine.faults` has the classes.
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(around or contextlib.nullcontext())
            async with deadline(ANSWER_TIMEOUT_S, "the agent did not start the command"):
                channel = await stack.enter_async_context(
                    guest.operation("exec", _members(request))
                )
                first = await channel.receive()
            if first.kind is not Kind.EVENT:
                _refuse(first, request.args[0])
            started = Started(ExecStarted.read(first.members(), "exec").pid)
            return cls(channel, stack.pop_all(), started, request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def __aiter__(self) -> AsyncIterator[ExecEvent]:
        """Yield the events; `Exited` is the last.

        Raises:
            EngineExited: The machine ended under the command.
        """
        yield self._started
        while True:
            frame = await self._channel.receive()
            if frame.kind is Kind.STDOUT:
                yield Stdout(frame.payload)
            elif frame.kind is Kind.STDERR:
                yield Stderr(frame.payload)
            else:
                ended = ExecEnded.read(answer(frame), "exec")
                self._over = True
                yield Exited(**ended.model_dump())
                return

    async def write_stdin(self, data: bytes) -> None:
        """Hand over input, in pieces; see the API."""
        if not self._stdin_open:
            raise Conflict("the command has no open standard input")
        for start in range(0, len(data), STDIN_CHUNK_BYTES_MAX):
            if self._over:
                return
            await self._channel.send(Kind.STDIN, data[start : start + STDIN_CHUNK_BYTES_MAX])

    async def close_stdin(self) -> None:
        """End the input; see the API."""
        if self._stdin_open and not self._over:
            self._stdin_open = False
            await self._channel.send(Kind.STDIN_EOF)

    async def send_signal(self, signal: int) -> None:
        """Send a signal; see the API."""
        if not self._over:
            await self._channel.send_json(Kind.CONTROL, {"signal": signal})

    async def resize(self, size: TtySize) -> None:
        """Resize the terminal; see the API."""
        if not self._has_tty:
            raise Conflict("the command has no terminal")
        if not self._over:
            members = {"resize": {"rows": size.rows, "columns": size.columns}}
            await self._channel.send_json(Kind.CONTROL, members)

    async def aclose(self) -> None:
        """Let go of the command; see the API."""
        if not self._over or self._takes_input:
            # Input that the agent has not read would confuse the next operation.
            self._channel.close()
        await self._operation.aclose()


def _refuse(first: Frame, program: str) -> NoReturn:
    """Raise what an agent says instead of starting a program."""
    try:
        answer(first)
    except NotFound as error:
        raise NotFound(str(error), **{**error.context, "program": program}) from None
    raise EngineError("an agent ended a command that it never started")


def _members(request: ExecRequest) -> JsonObject:
    tty: JsonValue = None
    if request.tty is not None:
        tty = {"rows": request.tty.rows, "columns": request.tty.columns}
    return {
        "args": list(request.args),
        "env": dict(request.env),
        "cwd": request.cwd,
        "user": request.user,
        "timeout_s": request.timeout_s,
        "stdin": request.stdin,
        "tty": tty,
    }
