"""A proxy that loses answers: it cuts a connection within an answer, or right before it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter
    from collections.abc import AsyncIterator

PIECE_BYTES = 65_536


class Dice(Protocol):
    """What `random.Random` is, too."""

    def random(self) -> float: ...


@dataclass
class Cutting:
    """What a proxy does.

    Attributes:
        upstream: The URL that it stands before.
        dice: What decides.
        lost_share: How many of the answers are lost.
        url: Where it is.
        lost: How many answers were lost.
        early: How many of them before the daemon had begun to answer.
    """

    upstream: str
    dice: Dice
    lost_share: float
    url: str = ""
    lost: int = 0
    early: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Pass one connection on until it is cut, or ends."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there = urlsplit(self.upstream)
        answers, requests = await asyncio.open_connection(there.hostname, there.port)
        back = asyncio.create_task(self._back(answers, writer))
        forth = asyncio.create_task(self._forth(reader, requests, back))
        await asyncio.wait({back, forth}, return_when=asyncio.FIRST_COMPLETED)
        for each in (back, forth):
            each.cancel()
        await asyncio.gather(back, forth, return_exceptions=True)
        for stream in (requests, writer):
            stream.close()

    async def ended(self) -> None:
        """Return once every connection has ended."""
        await asyncio.gather(*self._tasks)

    async def _forth(
        self, reader: StreamReader, requests: StreamWriter, back: asyncio.Task[None]
    ) -> None:
        while data := await reader.read(PIECE_BYTES):
            requests.write(data)
            await requests.drain()
            if self.dice.random() < self.lost_share / 2:
                self.lost, self.early = self.lost + 1, self.early + 1
                back.cancel()
                return

    async def _back(self, answers: StreamReader, writer: StreamWriter) -> None:
        while data := await answers.read(PIECE_BYTES):
            if self.dice.random() < self.lost_share / 2:
                self.lost += 1
                writer.write(data[: int(len(data) * self.dice.random())])
                await writer.drain()
                return
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def cutting(upstream: str, dice: Dice, *, lost_share: float) -> AsyncIterator[Cutting]:
    """Serve a proxy before `upstream`, which is an `http://` URL."""
    proxy = Cutting(upstream, dice, lost_share)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        proxy.url = f"http://{host}:{port}"
        yield proxy
        await proxy.ended()
