"""Clients that take a daemon's connections and time, and want nothing of it.

    crowd = Crowd("/run/forkd/forkd.sock", 200)
    await crowd.act()       # each does one thing more
    crowd.leave()

`python -m tests.support.crowd SOCKET COUNT PACE_S` is a crowd in a process of its own.  A line on
its standard input has all come, and each do something at that pace; another has all go; it prints a
line once they have.  A client whose deadline has come, and which was cut off, comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from enum import StrEnum
from pathlib import Path
from typing import cast

from forkd.host import proc

HEADER = b"POST /v2/sandboxes HTTP/1.1\r\nHost: forkd\r\nX-Slow: "
BODY = b"POST /v2/sandboxes HTTP/1.1\r\nHost: forkd\r\nContent-Length: 100000\r\n\r\n{"
HALF = b'POST /v2/sandboxes HTTP/1.1\r\nHost: forkd\r\nContent-Length: 100\r\n\r\n{"snap'


class Manner(StrEnum):
    """What a client does with a daemon's time."""

    SLOW_HEADER = "slow header"
    SLOW_BODY = "slow body"
    SILENT = "silent"
    VANISHING = "vanishing"


BEGINNINGS = {
    Manner.SLOW_HEADER: HEADER,
    Manner.SLOW_BODY: BODY,
    Manner.SILENT: b"",
    Manner.VANISHING: HALF,
}
"""What each says first."""


class Visitor(asyncio.Protocol):
    """One client; it reads what it is told, and does not care."""

    def __init__(self, socket: Path, manner: Manner) -> None:
        self._socket = str(socket)
        self.manner = manner
        self._transport: asyncio.Transport | None = None

    @property
    def is_here(self) -> bool:
        """Whether it has a connection."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be here."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Be gone."""
        self._transport = None

    async def act(self) -> None:
        """Come, or do what it does while it is here."""
        if self._transport is None:
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: self, self._socket)
            self._say(BEGINNINGS[self.manner])
        elif self.manner is Manner.VANISHING:
            self.leave()
        elif self.manner is not Manner.SILENT:
            self._say(b"x")

    def leave(self) -> None:
        """Go, without a word."""
        if self._transport is not None:
            self._transport.abort()

    def _say(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


class Crowd:
    """So many clients, of each manner as many."""

    def __init__(self, socket: Path, count: int) -> None:
        manners = itertools.islice(itertools.cycle(Manner), count)
        self.visitors = [Visitor(socket, manner) for manner in manners]

    async def act(self) -> None:
        """Have each do one thing more."""
        for visitor in self.visitors:
            await visitor.act()

    def leave(self) -> None:
        """Have all go at once."""
        for visitor in self.visitors:
            visitor.leave()


async def _live(crowd: Crowd, pace_s: float) -> None:
    """Have each do something at its time, for ever."""
    await crowd.act()
    _say("here")
    for visitor in itertools.cycle(crowd.visitors):
        await asyncio.sleep(pace_s / len(crowd.visitors))
        await visitor.act()


async def _main(socket: Path, count: int, pace_s: float) -> None:
    crowd = Crowd(socket, count)
    while await asyncio.to_thread(sys.stdin.readline):
        living = asyncio.ensure_future(_live(crowd, pace_s))
        told = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
        await asyncio.wait([living, told], return_when=asyncio.FIRST_COMPLETED)
        living.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await living  # raises if it ended by itself
        crowd.leave()
        await asyncio.sleep(0)  # for their ends to be sent
        _say("gone")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    proc.raise_open_files_limit()
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
