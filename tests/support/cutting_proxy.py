"""A proxy in front of a daemon that loses answers: it closes the connection instead."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PIECE_BYTES = 64 * 1024


@dataclass
class CuttingProxy:
    """Loses every nth answer, whose work the daemon has done.

    Attributes:
        path: The Unix socket that it listens at.
        every: Which n.
        answers: How many there were.
        lost: How many of them were lost.
    """

    path: str
    every: int
    answers: int = 0
    lost: int = 0

    def loses(self, piece: bytes) -> bool:
        """Whether this piece begins an answer that is lost."""
        if not piece.startswith(b"HTTP/1.1 "):
            return False
        self.answers += 1
        self.lost += self.answers % self.every == 0
        return self.answers % self.every == 0


@contextlib.asynccontextmanager
async def cutting_proxy(upstream: str, path: str, every: int) -> AsyncIterator[CuttingProxy]:
    """Pass bytes on between a socket and the daemon's, for the block."""
    proxy = CuttingProxy(path, every)

    led: set[asyncio.Task[None]] = set()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(upstream)
        forth = asyncio.ensure_future(_pass_on(reader, there_writer))
        try:
            while piece := await there_reader.read(PIECE_BYTES):
                if proxy.loses(piece):
                    break
                writer.write(piece)
                await writer.drain()
        finally:
            forth.cancel()
            await asyncio.wait([forth])
            for each in (writer, there_writer):
                each.close()
                with contextlib.suppress(ConnectionError):
                    await each.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        led.add(asyncio.ensure_future(lead(reader, writer)))

    server = await asyncio.start_unix_server(accept, path)
    async with server:
        yield proxy
    for each in led:
        each.cancel()
    await asyncio.gather(*led, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
