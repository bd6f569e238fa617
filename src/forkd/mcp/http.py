"""Serve clients over HTTP, in the daemon: each request by itself, without sessions."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from forkd.limits import BODY_BYTES_MAX
from forkd.mcp.asgi import OwnClient
from forkd.mcp.server import make_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from forkd.sdk import AsyncClient


def make_endpoint(version: str, asked: str) -> ASGIApp:
    """Return what answers requests of clients.

    Args:
        version: Of forkd.
        asked: Where the scope of a request has the application that its tools ask.
    """

    @asynccontextmanager
    async def client(request: Request) -> AsyncIterator[AsyncClient]:
        app: ASGIApp = request.scope[asked]
        async with OwnClient(app, request.scope) as own:
            yield own

    server = make_server(version, client)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        manager: Any = StreamableHTTPSessionManager(
            server, stateless=True, max_request_body_size=BODY_BYTES_MAX
        )
        async with manager.run():  # all that it starts ends with this request
            await manager.handle_request(scope, receive, send)

    return serve
