"""Connections to programs that listen in sandboxes, each over a WebSocket of its own.

A binary message is bytes, an empty one the end of a direction.  What refuses a connection is
answered before the WebSocket begins, as an error of any request; what breaks it later is the
reason with which the WebSocket is closed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from starlette.websockets import WebSocketDisconnect

from forkd.daemon.streaming import first_error
from forkd.errors import ForkdError, InvalidRequest
from forkd.model.caller import note_error

if TYPE_CHECKING:
    from fastapi import WebSocket

    from forkd.model.caller import Caller
    from forkd.model.ids import SandboxId
    from forkd.service.api import Guests
    from forkd.service.api_streams import PortSession

log = logging.getLogger(__name__)

BROKEN = 1008
"""Code with which a WebSocket is closed whose connection broke; the reason says why."""

REASON_CHARS_MAX = 100
"""Longest reason; the protocol has room for 123 bytes."""


async def connect(
    websocket: WebSocket, guests: Guests, caller: Caller, sandbox: SandboxId, port: str
) -> None:
    """Connect a client to the program that listens on a port.

    Raises:
        InvalidRequest: That is no port.
        ForkdError: What the service raises instead of a connection.
    """
    if not (port.isascii() and port.isdecimal()):
        raise InvalidRequest(f"{port[:20]!r} is not a port: a number from 1 to 65535", field="port")
    async with await guests.connect(caller, sandbox, int(port[:20])) as session:
        await websocket.accept()
        try:
            await _relay(websocket, session)
            await websocket.close()
        except WebSocketDisconnect:
            log.info("port %s of %s: client left", port, sandbox)
        except ForkdError as error:
            note_error(error.code)
            await websocket.close(BROKEN, str(error)[:REASON_CHARS_MAX])


async def _relay(websocket: WebSocket, session: PortSession) -> None:
    with first_error():
        async with asyncio.TaskGroup() as group:
            listener = group.create_task(_listen(websocket, session))
            async for data in session:
                await websocket.send_bytes(data)
            listener.cancel()


async def _listen(websocket: WebSocket, session: PortSession) -> None:
    """Pass on what the client sends, until it leaves, which raises."""
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1006))
        data = message.get("bytes")
        if data is None:
            raise InvalidRequest("messages are binary")
        if data:
            await session.send(data)
        else:
            await session.send_end()
