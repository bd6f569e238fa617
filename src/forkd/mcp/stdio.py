"""Serve the program that started this one, over standard input and output."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from mcp.server.stdio import stdio_server

from forkd.limits import MCP_CALLS_MAX
from forkd.mcp.server import make_server
from forkd.sdk import AsyncClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.sdk import Endpoint


def serve(endpoint: Endpoint, version: str) -> None:
    """Serve until standard input ends; calls that run then are cancelled."""
    asyncio.run(_serve(endpoint, version))


async def _serve(endpoint: Endpoint, version: str) -> None:
    async with AsyncClient(
        endpoint.url,
        token=endpoint.token,
        ca_file=endpoint.ca_file,
        client_cert=endpoint.client_cert,
        client_key=endpoint.client_key,
    ) as daemon:

        @asynccontextmanager
        async def client(_: object) -> AsyncIterator[AsyncClient]:
            yield daemon

        server = make_server(version, client, asyncio.Semaphore(MCP_CALLS_MAX))
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())
