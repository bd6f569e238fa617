"""A client of the daemon inside of the daemon: its requests go to the application itself.

They are made in the name of the request that they serve: with its token, from its address or its
user, and through all that surrounds every request.  So scopes, tenants, quotas and the audit log
are those of any other client, and nobody can do more here than with the REST API.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx

from forkd.errors import TransportError
from forkd.sdk import AsyncClient, Endpoint
from forkd.sdk._async.http import AsyncHttp
from forkd.sdk._errors import from_answer
from forkd.sdk._retries import RETRIES_MAX
from forkd.sdk._transport import AsyncSocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping
    from typing import TypeAlias

    from starlette.types import ASGIApp, Message, Scope

    Headers: TypeAlias = list[tuple[bytes, bytes]]

ENDPOINT = Endpoint("http://forkd")
"""What an error calls the daemon."""

FORWARDED = (b"authorization", b"host")
"""The fields of a header that say who asks, and whom."""

WAITING_MESSAGES_MAX = 4
"""Most pieces of an answer that wait to be read."""


class OwnClient(AsyncClient):
    """A client of `app`, in the name of the request whose scope is `scope`."""

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        self._begin(_OwnHttp(app, scope))


class _OwnHttp(AsyncHttp):
    local_files = False  # they would be the daemon's

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        self.endpoint = ENDPOINT
        self._app = app
        self._scope = scope
        self._retries_max = RETRIES_MAX
        self._client = httpx.AsyncClient(
            base_url=ENDPOINT.http_url, transport=_Transport(app, scope), trust_env=False
        )

    async def socket(self, path: str) -> AsyncSocket:
        self._check_open()
        return await _Socket.open(self._app, self._scope, path)


def _scope(kind: str, of: Scope, path: str, query: bytes, headers: Headers) -> Scope:
    """Return the scope of a request in the name of another."""
    named = [(name, value) for name, value in of["headers"] if name in FORWARDED]
    return {
        "type": kind,
        "asgi": of["asgi"],
        "http_version": "1.1",
        "scheme": of["scheme"],
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": [*headers, *named],
        "client": of["client"],
        "server": of["server"],
        "state": of["state"],
    }


class _Conversation:
    """The application as it serves one request: messages to it, and messages from it."""

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        self._left = asyncio.Event()
        self._said: asyncio.Queue[Message | None] = asyncio.Queue(WAITING_MESSAGES_MAX)
        self._task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self.heard, self._send)
        finally:
            await self._put(None)

    async def heard(self) -> Message:
        """Return the next message to the application."""
        raise NotImplementedError

    async def gone(self) -> None:
        """Return when this side has left."""
        await self._left.wait()

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self._put(message)

    async def _put(self, message: Message | None) -> None:
        """Hand a message over; nobody wants it once this side has left."""
        putting = asyncio.ensure_future(self._said.put(message))
        leaving = asyncio.ensure_future(self._left.wait())
        try:
            await asyncio.wait([putting, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            putting.cancel()
            leaving.cancel()

    async def said(self) -> Message:
        """Return the next message of the application.

        Raises:
            TransportError: There are no more.
        """
        message = await self._said.get()
        if message is None:
            raise TransportError("the daemon ended its answer before it was whole")
        return message

    async def leave(self) -> None:
        """Go away, and wait until the application has noticed."""
        self._left.set()
        await asyncio.wait([self._task])


class _Exchange(_Conversation):
    """A request with a body."""

    def __init__(self, app: ASGIApp, scope: Scope, body: AsyncIterator[bytes]) -> None:
        self._body: AsyncIterator[bytes] | None = body
        super().__init__(app, scope)

    async def heard(self) -> Message:
        """Return the next piece of the body, or that the client has gone."""
        if self._body is not None:
            async for piece in self._body:
                return {"type": "http.request", "body": piece, "more_body": True}
            self._body = None
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.gone()
        return {"type": "http.disconnect"}


class _Transport(httpx.AsyncBaseTransport):
    """Makes requests of httpx to an application; answers are read as they come."""

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        self._app = app
        self._scope = scope

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return an answer as soon as its header is there."""
        assert isinstance(request.stream, httpx.AsyncByteStream)  # noqa: S101 - of an async client
        ours = (b"host", b"authorization")
        headers = [
            (name.lower(), value) for name, value in request.headers.raw if name.lower() not in ours
        ]
        scope = _scope("http", self._scope, request.url.path, request.url.query, headers)
        scope["method"] = request.method
        scope["raw_path"] = request.url.raw_path.partition(b"?")[0]
        exchange = _Exchange(self._app, scope, aiter(request.stream))
        try:
            start = await _in_time(exchange, request)
        except BaseException:
            await exchange.leave()
            raise
        answer = _Answer(exchange, request)
        return httpx.Response(start["status"], headers=start["headers"], stream=answer)


async def _in_time(exchange: _Exchange, request: httpx.Request) -> Message:
    """Return the next message, within the time that a request allows.

    Raises:
        ReadTimeout: It did not come.
    """
    try:
        async with asyncio.timeout(request.extensions.get("timeout", {}).get("read")):
            return await exchange.said()
    except TimeoutError:
        raise httpx.ReadTimeout("no answer in time", request=request) from None
    except TransportError as error:
        raise httpx.RemoteProtocolError(str(error), request=request) from None


class _Answer(httpx.AsyncByteStream):
    def __init__(self, exchange: _Exchange, request: httpx.Request) -> None:
        self._exchange = exchange
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await _in_time(self._exchange, self._request)
            more = message.get("more_body", False)
            if body := message.get("body", b""):
                yield body

    async def aclose(self) -> None:
        await self._exchange.leave()


class _Socket(AsyncSocket, _Conversation):
    """A WebSocket of binary messages."""

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        self._sent: asyncio.Queue[bytes] = asyncio.Queue(WAITING_MESSAGES_MAX)
        self._connected = False
        _Conversation.__init__(self, app, scope)

    @classmethod
    async def open(cls, app: ASGIApp, of: Scope, path: str) -> _Socket:
        """Open one.

        Raises:
            ForkdError: The daemon refused.
        """
        scope = _scope("websocket", of, path, b"", [])
        scope["scheme"] = "wss" if of["scheme"] == "https" else "ws"
        scope["subprotocols"] = []
        scope["extensions"] = {"websocket.http.response": {}}
        made = cls(app, scope)
        try:
            await made._accepted()
        except BaseException:
            await made.leave()
            raise
        return made

    async def _accepted(self) -> None:
        start = await self.said()
        if start["type"] == "websocket.accept":
            return
        body, more = b"", start["type"] == "websocket.http.response.start"
        while more:
            message = await self.said()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        raise from_answer(start.get("status", 403), body)

    async def heard(self) -> Message:
        """Return what was sent next, or that the client has gone."""
        if not self._connected:
            self._connected = True
            return {"type": "websocket.connect"}
        getting = asyncio.ensure_future(self._sent.get())
        leaving = asyncio.ensure_future(self.gone())
        try:
            await asyncio.wait([getting, leaving], return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return {"type": "websocket.receive", "bytes": getting.result()}
            return {"type": "websocket.disconnect", "code": 1000}
        finally:
            getting.cancel()
            leaving.cancel()

    async def send(self, message: bytes) -> None:
        """Send one message; waits while the other side has no room."""
        sending = asyncio.ensure_future(self._sent.put(message))
        try:
            await asyncio.wait([sending, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise TransportError("the connection to the daemon broke: it was closed")
        finally:
            sending.cancel()

    async def receive(self) -> bytes:
        """Return the next message."""
        message = await self.said()
        if message["type"] != "websocket.send":
            said = message.get("reason") or "it was closed"
            raise TransportError(f"the connection to the daemon broke: {said}")
        data: bytes = message["bytes"]
        return data

    async def aclose(self) -> None:
        """Close; idempotent."""
        await self.leave()
