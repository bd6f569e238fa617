"""`/mcp`: the MCP server of `forkd.mcp`, for agents that have a token of ours.

The daemon knows nothing of tools: it hands a request to that server, whose own requests come back
to it as those of any client.  The package is loaded with the first request, in another thread.

Clients find out how to be let in as OAuth 2.0 has it: an answer to who has no valid token names the
metadata of this resource (RFC 9728), which says that a bearer token belongs into the header.  There
is no authorization server: `forkd token create` makes tokens.
"""

from __future__ import annotations

import asyncio
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from starlette.datastructures import URL
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import forkd
from forkd.daemon.bodies import bounded
from forkd.daemon.errors import render
from forkd.daemon.peers import MCP_METADATA_PATHS, MCP_PATH, REQUESTS
from forkd.errors import NotFound
from forkd.model.caller import Scope as CallerScope

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MISSING = (
    "this daemon has no MCP: install it where the daemon runs, `pip install 'forkd-vm[mcp]'`, and "
    "restart the daemon"
)


class McpRoute(Route):
    """The route of the server, named for the audit log."""

    operation_id = "mcp"

    def __init__(self) -> None:
        super().__init__(MCP_PATH, _Endpoint(), methods=["GET", "POST", "DELETE"])


class MetadataRoute(Route):
    """The route of the metadata of the server."""

    operation_id = "mcp_metadata"

    def __init__(self, path: str) -> None:
        super().__init__(path, _metadata, methods=["GET"])


def routes() -> list[Route]:
    """Return the routes of the server."""
    return [McpRoute(), *(MetadataRoute(each) for each in MCP_METADATA_PATHS)]


@cache
def _endpoint() -> ASGIApp:
    made: ASGIApp = import_module("forkd.mcp.http").make_endpoint(forkd.__version__, REQUESTS)
    return made


class _Endpoint:
    """Hands requests to the server."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if find_spec("mcp") is None:
            await render(NotFound(MISSING))(scope, receive, send)
            return
        endpoint = await asyncio.to_thread(_endpoint)
        request = bounded(Request(scope, receive))
        await endpoint(scope, request.receive, send)


async def _metadata(request: Request) -> JSONResponse:
    """Return what a client needs to know to be let in."""
    resource = URL(scope={**request.scope, "path": MCP_PATH, "query_string": b""})
    return JSONResponse(
        {
            "resource": str(resource),
            "resource_name": "forkd",
            "bearer_methods_supported": ["header"],
            "scopes_supported": sorted({CallerScope.READ, CallerScope.RUN, CallerScope.SNAPSHOTS}),
        }
    )
