"""Programs and code in a guest: buffered in one answer, or attached to a WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.websockets import WebSocketDisconnect

from forkd.daemon import convert
from forkd.daemon.errors import body_of, invalid
from forkd.daemon.streaming import first_error, with_outputs
from forkd.errors import EngineExited, EngineTimeout, ForkdError, InvalidRequest
from forkd.limits import EVAL_OUTPUT_BYTES_MAX, EXEC_OUTPUT_BYTES_MAX, MESSAGE_BYTES_MAX
from forkd.model.exec import Exited, Started, Stderr, Stdout
from forkd.wire import v2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from fastapi import Response, WebSocket

    from forkd.model.caller import Caller
    from forkd.model.exec import ExecEvent, ExecRequest
    from forkd.model.ids import SandboxId
    from forkd.model.output import Kept
    from forkd.service.api import Guests
    from forkd.service.api_streams import ExecSession

Keep: TypeAlias = "Callable[[int], Kept]"
"""Keeps up to so many bytes of an output until its request is over."""

M = TypeVar("M", bound=BaseModel)

log = logging.getLogger(__name__)

FIRST_MESSAGE_TIMEOUT_S = 30.0
"""Time a client has, from connecting until it has said what to run."""

SIGNAL_EXIT_BASE = 128
"""A shell's exit code for a program ended by signal n is this plus n."""


async def run(
    guests: Guests, caller: Caller, sandbox: SandboxId, request: v2.Exec, keep: Keep
) -> Response:
    """Run a program to its end and answer its output, the first `EXEC_OUTPUT_BYTES_MAX` of each.

    Raises:
        EngineExited: The machine ended before the program did.
        ForkdError: Whatever the service raises.
    """
    stdout, stderr = kept = keep(EXEC_OUTPUT_BYTES_MAX), keep(EXEC_OUTPUT_BYTES_MAX)
    wanted = convert.exec_request(request)
    ended = await to_the_end(guests, caller, sandbox, wanted, kept, request.stdin)
    result = v2.ExecResult(
        exit_code=_shell_code(ended),
        signal=ended.signal,
        timed_out=ended.timed_out,
        duration_s=ended.duration_s,
        stdout="",
        stderr="",
        truncated=ended.truncated or stdout.truncated or stderr.truncated,
    )
    return with_outputs(result, {"stdout": stdout, "stderr": stderr})


async def to_the_end(  # noqa: PLR0913, PLR0917 - what an exec has
    guests: Guests,
    caller: Caller,
    sandbox: SandboxId,
    request: ExecRequest,
    kept: tuple[Kept, Kept],
    stdin: str | None = None,
) -> Exited:
    """Run a program, keep what it writes to stdout and stderr, and return how it ended.

    Raises:
        EngineExited: The machine ended before the program did.
        ForkdError: Whatever the service raises.
    """
    async with await guests.exec(caller, sandbox, request) as session:
        with first_error():
            async with asyncio.TaskGroup() as group:
                feeder = group.create_task(_feed(session, stdin))
                ended = await _collect(session, *kept)
                feeder.cancel()
    return ended


async def evaluate(
    guests: Guests, caller: Caller, sandbox: SandboxId, request: v2.Eval, keep: Keep
) -> Response:
    """Run code in the warm runtime and answer what it gave.

    Raises:
        ForkdError: Whatever the service raises.
    """
    stdout, stderr = kept = keep(EVAL_OUTPUT_BYTES_MAX), keep(EVAL_OUTPUT_BYTES_MAX)
    result = await guests.eval(
        caller,
        sandbox,
        request.code,
        timeout_s=request.timeout_secs,
        kept=kept,
        runtime=request.runtime,
        context=request.context,
        env=request.env,
    )
    return with_outputs(convert.eval_result(result), {"stdout": stdout, "stderr": stderr})


async def _feed(session: ExecSession, text: str | None) -> None:
    if text:
        await session.write_stdin(text.encode())
        await session.close_stdin()


async def _collect(session: ExecSession, stdout: Kept, stderr: Kept) -> Exited:
    async for event in session:
        match event:
            case Stdout(data):
                stdout.add(data)
            case Stderr(data):
                stderr.add(data)
            case Exited():
                return event
            case Started():
                pass
    raise EngineExited("the machine ended before the program did")


def _shell_code(ended: Exited) -> int:
    if ended.exit_code is not None:
        return ended.exit_code
    return SIGNAL_EXIT_BASE + (ended.signal or 0)


async def attach(
    websocket: WebSocket,
    guests: Guests,
    caller: Caller,
    sandbox: str,
    find: Callable[[str], Awaitable[SandboxId]],
) -> None:
    """Serve one exec WebSocket: a REQUEST, then streams both ways, then REPLY or ERROR.

    `find` returns the id of the sandbox that a client has so written.
    """
    async with _accepted(websocket, f"exec in {sandbox}"):
        request = await _first_message(websocket, v2.ExecStart)
        session = await guests.exec(caller, await find(sandbox), convert.exec_request(request))
        async with session:
            await _converse(websocket, session)


async def attach_eval(
    websocket: WebSocket,
    guests: Guests,
    caller: Caller,
    sandbox: str,
    find: Callable[[str], Awaitable[SandboxId]],
) -> None:
    """Serve one eval WebSocket: a REQUEST, then what the code prints, then REPLY or ERROR.

    `find` is as of `attach`.
    """
    async with _accepted(websocket, f"eval in {sandbox}"):
        request = await _first_message(websocket, v2.Eval)
        with first_error():
            async with asyncio.TaskGroup() as group:
                listener = group.create_task(_until_left(websocket))
                result = await guests.eval(
                    caller,
                    await find(sandbox),
                    request.code,
                    timeout_s=request.timeout_secs,
                    runtime=request.runtime,
                    context=request.context,
                    env=request.env,
                    on_output=lambda output: _send(websocket, *_message(output)),
                )
                listener.cancel()
        await _send(websocket, v2.Kind.REPLY, _eval_reply(convert.eval_result(result)))


def _eval_reply(result: v2.EvalResult) -> bytes:
    """Return a result as one message; one that is too long says how much it has left out."""
    reply = result.model_dump_json().encode()
    if len(reply) >= MESSAGE_BYTES_MAX:
        left_out = {"results": [], "more_results": result.more_results + len(result.results)}
        reply = result.model_copy(update=left_out).model_dump_json().encode()
    return reply


@contextlib.asynccontextmanager
async def _accepted(websocket: WebSocket, what: str) -> AsyncGenerator[None, None]:
    """Accept a WebSocket for the block, and close it; an error of ours is told before that."""
    await websocket.accept()
    try:
        try:
            yield
        except ForkdError as error:
            await _send(websocket, v2.Kind.ERROR, body_of(error).model_dump_json().encode())
        await websocket.close()
    except WebSocketDisconnect:
        log.info("%s: client left", what)


async def _first_message(websocket: WebSocket, model: type[M]) -> M:
    try:
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
            kind, payload = await _receive(websocket)
    except TimeoutError as error:
        raise EngineTimeout("no REQUEST came") from error
    if kind is not v2.Kind.REQUEST:
        raise InvalidRequest(f"the first message must be a REQUEST, not {kind.name}")
    try:
        return model.model_validate_json(payload)
    except ValidationError as error:
        raise invalid(error) from error


async def _converse(websocket: WebSocket, session: ExecSession) -> None:
    with first_error():
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(_listen(websocket, session))
            async for event in session:
                await _send(websocket, *_message(event))
            listener.cancel()


def _message(event: ExecEvent) -> tuple[v2.Kind, bytes]:
    match event:
        case Stdout(data):
            return v2.Kind.STDOUT, data
        case Stderr(data):
            return v2.Kind.STDERR, data
        case Started(pid):
            return v2.Kind.EVENT, v2.ExecStarted(pid=pid).model_dump_json().encode()
        case Exited():
            return v2.Kind.REPLY, convert.exec_exit(event).model_dump_json().encode()


async def _listen(websocket: WebSocket, session: ExecSession) -> None:
    """Pass on what the client sends, until it leaves, which raises."""
    while True:
        kind, payload = await _receive(websocket)
        match kind:
            case v2.Kind.STDIN:
                await session.write_stdin(payload)
            case v2.Kind.STDIN_EOF:
                await session.close_stdin()
            case v2.Kind.CONTROL:
                await _control(session, payload)
            case _:
                raise InvalidRequest(f"a client does not send {kind.name} here")


async def _until_left(websocket: WebSocket) -> None:
    """Wait until the client leaves, which raises; it has nothing more to say."""
    kind, _ = await _receive(websocket)
    raise InvalidRequest(f"a client does not send {kind.name} here")


async def _control(session: ExecSession, payload: bytes) -> None:
    try:
        order = v2.ExecControl.model_validate_json(payload)
    except ValidationError as error:
        raise invalid(error) from error
    if order.signal is not None:
        await session.send_signal(order.signal)
    if order.resize is not None:
        await session.resize(convert.tty_size(order.resize))


async def _receive(websocket: WebSocket) -> tuple[v2.Kind, bytes]:
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    data = message.get("bytes")
    if not data:
        raise InvalidRequest("messages are binary: a kind and a payload")
    try:
        return v2.Kind(data[0]), data[1:]
    except ValueError as error:
        raise InvalidRequest(f"{data[0]} is not a kind of message") from error


async def _send(websocket: WebSocket, kind: v2.Kind, payload: bytes) -> None:
    await websocket.send_bytes(bytes([kind]) + payload)
