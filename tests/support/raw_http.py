"""A client that says bytes and reads answers, for what no HTTP library would do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from types import TracebackType

DEADLINE_S = 20.0

WEBSOCKET = (
    "GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{more}\r\n"
)
"""A WebSocket's handshake."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, or the beginning of one."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:  # noqa: ANN401 - whatever the daemon says
        return json.loads(self.body)


class RawClient:
    """A connection to a daemon; every wait has a deadline."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> Self:
        parts = urlsplit(self._url)
        if parts.scheme == "unix":
            opening = asyncio.open_unix_connection(parts.path)
        else:
            opening = asyncio.open_connection(parts.hostname, parts.port)
        self.reader, self.writer = await opening
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def say(self, data: str | bytes) -> None:
        """Send bytes, or text with the line ends that HTTP wants."""
        if isinstance(data, str):
            data = data.replace("\r\n", "\n").replace("\n", "\r\n").encode("latin-1")
        self.writer.write(data)

    async def answer(self, timeout_s: float = DEADLINE_S) -> Answer:
        """Return the next answer, whose length must be said."""
        async with asyncio.timeout(timeout_s):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *rest = head.strip().splitlines()
            headers = {
                key.lower(): value for key, _, value in (each.partition(": ") for each in rest)
            }
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
            return Answer(int(first.split()[1]), headers, body)

    async def rest(self) -> bytes:
        """Return all that comes until the connection ends, broken off or not."""
        said = b""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    said += piece
        return said


async def ask(url: str, request: str) -> Answer:
    """Return the answer to one request over a connection of its own."""
    async with RawClient(url) as client:
        client.say(request)
        return await client.answer()
