"""What surrounds every request: an id, who asks, and an end to it.

A request has an id, which its log lines and its answer's `X-Request-Id` bear.  Whoever listens
knows who asks: the Unix socket and TCP in different ways.  A handler whose client has gone is
cancelled: nobody waits for it, and what it was about to make would belong to nobody.  A handler
that crashes is logged once, with its traceback, and answered with a 500.  There are only so many
at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import TYPE_CHECKING

from starlette.datastructures import URL, Headers
from starlette.requests import ClientDisconnect

from forkd.daemon.auditing import Auditor
from forkd.daemon.bodies import Room
from forkd.daemon.clients import EVENTS_PATH, HEADER_BYTES_MAX
from forkd.daemon.connections import too_much
from forkd.daemon.errors import CRASH, internal_error, plain, render
from forkd.daemon.fair_loop import whose, whose_is
from forkd.daemon.peers import (
    ANYBODY,
    CALLER,
    END,
    HELD,
    MCP_METADATA_PATHS,
    MCP_PATH,
    OPEN_PATHS,
    REQUESTS,
    VISITOR,
)
from forkd.errors import CapacityError, Denied, ForkdError, NotFound
from forkd.limits import ANSWERS_BYTES_MAX
from forkd.model.caller import Request, current_request, note_error
from forkd.model.shares import Shares
from forkd.service.supervision import is_reported
from forkd.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator

    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from forkd.daemon.clients import ClientLimits
    from forkd.daemon.visitors import Visitor
    from forkd.model.caller import Caller
    from forkd.telemetry.telemetry import Telemetry

REQUEST_ID = b"x-request-id"

CLOSE = (b"connection", b"close")

BEGINNINGS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
"""Messages that begin an answer, and that have headers."""

KINDS = {"http": "requests", "websocket": "WebSockets", "events": "streams of events"}
"""What is counted, each by itself: the kind as in figures, and what a refusal calls it."""

SWITCHING = 101
"""Status of a WebSocket that was accepted."""

ENDS = ("websocket.close", "websocket.http.response.body")
"""Messages that end an answer, as the last piece of a body does."""

HEADER_TOO_LARGE = 431
HEADER_WORDS = f"the header is longer than {HEADER_BYTES_MAX} bytes"

REFUSED = 1008
"""Code with which a WebSocket is closed whose client may not go on: it breaks a rule of ours."""

REASON_CHARS_MAX = 100
"""Longest reason for that; the protocol has room for 123 bytes."""

PIECE_BYTES_MAX = 64 * 1024
"""Most of an answer that is handed to the server at once; it takes more when that was sent."""

log = logging.getLogger(__name__)


class Requests:
    """The application, with an id, a caller and an end for each request.

    Args:
        app: What answers.
        who: Returns who asks, from a connection's scope and the id of its request; may raise
            a `ForkdError`, which is the answer then.
        limits: What those may take who ask.
        telemetry: Where it is counted how many are being answered.
        auditor: Writes each request down.
    """

    def __init__(
        self,
        app: ASGIApp,
        who: Callable[[Scope, str], Awaitable[Caller]],
        limits: ClientLimits,
        telemetry: Telemetry,
        auditor: Auditor | None = None,
    ) -> None:
        self._app = app
        self._who = who
        self._telemetry = telemetry
        self._auditor = auditor or Auditor()
        self._answers = Room("answers", ANSWERS_BYTES_MAX)
        self._shares = {
            "http": Shares(limits.requests_max),
            "websocket": Shares(limits.websockets_max),
            "events": Shares(limits.events_max),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or serve one WebSocket."""
        method = scope.get("method", "WebSocket")
        request = Request(secrets.token_hex(8))
        answer = _Answer(send, request.id, self._answers if method == "GET" else None)
        token = current_request.set(request)
        try:
            with tracing.request(method, Headers(scope=scope)):
                try:
                    with self._auditor.request(scope, request, answer):
                        await self._serve(scope, receive, request.id, answer)
                finally:
                    _describe(scope, method, answer)
        finally:
            answer.release()
            current_request.reset(token)

    async def _serve(
        self, scope: Scope, receive: Receive, request_id: str, answer: _Answer
    ) -> None:
        try:
            if _header_bytes(scope) > HEADER_BYTES_MAX:
                await plain(HEADER_TOO_LARGE, HEADER_WORDS)(scope, receive, answer.send)
                return
            end = asyncio.Event()
            scope[END] = end.set
            scope[REQUESTS] = self
            with contextlib.ExitStack() as scope[HELD]:
                scope[CALLER] = answer.caller = await self._who(scope, request_id)
                _note_visit(scope, answer.caller)
                whose.set(whose_is(answer.caller))
                self._auditor.check(scope)
                with self._counted(scope):
                    await _until_gone(self._app, scope, receive, answer, end)
        except ForkdError as error:
            await _refuse(error, scope, receive, answer)
        except Exception as error:  # noqa: BLE001 - the one place where a crash becomes an answer
            scope[CRASH] = error
            if not answer.begun:
                await internal_error()(scope, receive, answer.send)
        finally:
            _report_crash(scope)

    @contextlib.contextmanager
    def _counted(self, scope: Scope) -> Iterator[None]:
        """Count a request for the block, or refuse it; whether we live can always be asked."""
        kind = "events" if scope["path"] == EVENTS_PATH else scope["type"]
        if scope["path"] in OPEN_PATHS:
            yield
            return
        caller: Caller = scope[CALLER]
        shares = self._shares[kind]
        if not shares.take(caller.tenant, whole=caller.is_admin):
            raise too_much(KINDS[kind])
        try:
            with self._telemetry.request(kind):
                yield
        finally:
            shares.give_back(caller.tenant)


class _Answer:
    """Sends an answer, with the id of its request, only as fast as its client reads it.

    One that is long, whole in memory, and finds no room there is refused instead, if there is a
    `room`: not where something was changed that the client must hear of.

    Attributes:
        begun: Whether any of it was sent.
        ended: Whether all of it was sent.
        status: Of HTTP; None before it was sent.
        caller: Whose memory it takes; None as long as nobody knows.
    """

    def __init__(self, send: Send, request_id: str, room: Room | None) -> None:
        self._send = send
        self._room = room
        self._held_bytes = 0
        self._refused = False
        self.request_id = request_id
        self.begun = False
        self.ended = False
        self.status: int | None = None
        self.caller: Caller | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "websocket.close" and not self.begun:
            raise NotFound("there is no WebSocket of this path")
        if self._refused:
            return
        if message["type"] == "http.response.start":
            try:
                self._hold(message)
            except CapacityError as error:
                await self._refuse(render(error))
                return
        if message["type"] in BEGINNINGS:
            self.begun = True
            self.status = message.get("status", SWITCHING)
            header = (REQUEST_ID, self.request_id.encode())
            closing = [CLOSE] if self._is_for_stranger(message) else []
            message["headers"] = [*message.get("headers", ()), header, *closing]
        if message["type"] != "http.response.body":
            await self._send(message)
            if message["type"] in ENDS and not message.get("more_body", False):
                self.ended = True
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        for start in range(0, max(1, len(body)), PIECE_BYTES_MAX):
            end = start + PIECE_BYTES_MAX
            piece = {"body": body[start:end], "more_body": more or end < len(body)}
            await self._send({"type": message["type"], **piece})
            # To a client that has gone everything is sent at once, and we would never be cancelled.
            await asyncio.sleep(0)
        self.ended = not more

    def release(self) -> None:
        """Hold nothing in memory any more."""
        if self._room is not None and self.caller is not None:
            self._room.give_back(self.caller, self._held_bytes)
            self._held_bytes = 0

    def _is_for_stranger(self, start: Message) -> bool:
        """Whether nobody has shown a token for it: such a client keeps no connection."""
        is_known = self.caller is not None and self.caller.principal != ANYBODY
        return not is_known and start["type"] != "websocket.accept"

    def _hold(self, start: Message) -> None:
        """Have room for an answer that says how long it is; others are made as they are sent."""
        length = int(Headers(raw=list(start.get("headers", ()))).get("content-length", "0"))
        if self._room is not None and self.caller is not None and length > PIECE_BYTES_MAX:
            self._room.take(self.caller, length)
            self._held_bytes = length

    async def _refuse(self, answer: Response) -> None:
        """Send `answer`, and nothing of what was to be sent."""
        start = {"status": answer.status_code, "headers": answer.raw_headers}
        await self.send({"type": "http.response.start", **start})
        await self.send({"type": "http.response.body", "body": bytes(answer.body)})
        self._refused = True


def _note_visit(scope: Scope, caller: Caller) -> None:
    """Have the connection count for its caller's tenant.

    Raises:
        CapacityError: The tenant has its share of all connections.
    """
    visitor: Visitor | None = scope.get("state", {}).get(VISITOR)
    if visitor is not None and caller.principal != ANYBODY and not visitor.show(caller):
        raise too_much("connections of this tenant")


def _describe(scope: Scope, method: str, answer: _Answer) -> None:
    """Say in a request's span what it was about, as far as it is known by now."""
    route = getattr(scope.get("route"), "path", "")
    said: dict[str, str | int] = {
        "forkd.request_id": answer.request_id,
        "http.request.method": method,
        "url.path": scope["path"],
    }
    if route:
        said["http.route"] = route
    if answer.status:
        said["http.response.status_code"] = answer.status
    tracing.note(said, name=f"{method} {route}".strip())


def _report_crash(scope: Scope) -> None:
    """Log what a handler raised that is no error of ours, with its traceback unless it has been."""
    error: Exception | None = scope.get(CRASH)
    if error is not None:
        fields = {"path": scope["path"]}
        log.error("request crashed", exc_info=None if is_reported(error) else error, extra=fields)
        note_error(ForkdError.code)


def _header_bytes(scope: Scope) -> int:
    """Return the length of a header; the server bounds only one that is incomplete."""
    fields = sum(len(name) + len(value) for name, value in scope["headers"])
    return fields + len(scope["raw_path"]) + len(scope["query_string"])


async def _refuse(error: ForkdError, scope: Scope, receive: Receive, answer: _Answer) -> None:
    """Answer with an error; of an answer that has begun there is only an end."""
    note_error(error.code)
    if not answer.begun:
        rendered = render(error)
        if isinstance(error, Denied) and scope["path"] == MCP_PATH:
            where = URL(scope={**scope, "path": MCP_METADATA_PATHS[0], "query_string": b""})
            rendered.headers["WWW-Authenticate"] = f'Bearer resource_metadata="{where}"'
        await rendered(scope, receive, answer.send)
    elif scope["type"] == "websocket":
        said = str(error)[:REASON_CHARS_MAX]
        await answer.send({"type": "websocket.close", "code": REFUSED, "reason": said})


async def _until_gone(
    app: ASGIApp, scope: Scope, receive: Receive, answer: _Answer, end: asyncio.Event
) -> None:
    """Run a handler until it ends, or its client has gone or may not ask any more: it is cancelled.

    Raises:
        Denied: Who asked may not any more.
    """
    client = _Client(receive, has_body=_has_body(scope))
    is_http = scope["type"] == "http"
    async with _cancelled_after(client.gone() if is_http else _never(), end.wait()) as others:
        handling: asyncio.Future[object] = asyncio.ensure_future(
            app(scope, client.receive if is_http else receive, answer.send)
        )
        try:
            await asyncio.wait([handling, *others], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not handling.done():
                log.info("request ended", extra={"path": scope["path"], "denied": end.is_set()})
                handling.cancel()
                await asyncio.wait([handling])
    if handling.cancelled() and end.is_set():
        raise Denied("the token was removed, or has expired")
    if not handling.cancelled():
        with contextlib.suppress(ClientDisconnect):  # in the middle of its body
            handling.result()


@contextlib.asynccontextmanager
async def _cancelled_after(
    *works: Coroutine[object, object, object],
) -> AsyncGenerator[list[asyncio.Future[object]], None]:
    """Run `works` beside the block, and cancel them at the block's end."""
    tasks: list[asyncio.Future[object]] = [asyncio.ensure_future(work) for work in works]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _never() -> None:
    await asyncio.Event().wait()


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


class _Client:
    """The messages of a request's client; looks for its end once its body has been read.

    A server wants one reader of messages.  Until the end of the body that is the handler, through
    `receive`; from then on it is `gone`.
    """

    def __init__(self, receive: Receive, *, has_body: bool) -> None:
        self._receive = receive
        self._empty = not has_body
        self._body_read = asyncio.Event()
        self._gone = asyncio.Event()
        if not has_body:
            self._body_read.set()

    async def receive(self) -> Message:
        """Return the next message, as ASGI has it."""
        if self._empty:
            self._empty = False
            return {"type": "http.request", "body": b"", "more_body": False}
        if self._body_read.is_set():
            await self._gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._gone.set()
        if not message.get("more_body", False):
            self._body_read.set()
        return message

    async def gone(self) -> None:
        """Return when the client has gone; never while its body is being read."""
        await self._body_read.wait()
        while not self._gone.is_set():
            if (await self._receive())["type"] == "http.disconnect":
                self._gone.set()
