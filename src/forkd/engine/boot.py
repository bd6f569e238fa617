"""Hear from the agent in a machine that it has booted.

The agent connects to the host once, on a port of its own; the VMM turns that into a
connection to a socket beside the machine's, which must listen before the machine starts.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from forkd.engine.channel import deadline
from forkd.engine.frames import FrameDecoder, Kind
from forkd.engine.process import CONTROL_SOCKET, VSOCK_SOCKET
from forkd.engine.replies import Booted
from forkd.engine.watch import Watch
from forkd.errors import EngineError, EngineExited
from forkd.host import files, ownership, sockets
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

BOOTED_PORT = 1025
"""The vsock port of the host on which agents announce themselves."""

GREETING_BYTES_MAX = 4_096
"""How much of an announcement is read at once; a proper one has some 50 bytes."""

GREETING_TIMEOUT_S = 10.0
"""How long a connection may take to say it."""


class BootListener:
    """Listens for one machine's agent; open it before the machine starts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / f"{VSOCK_SOCKET}_{BOOTED_PORT}"
        self._booted: asyncio.Future[str] | None = None
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._booted = asyncio.get_running_loop().create_future()
        listening = sockets.bind_unix(self._path, mode=0o600, backlog=1)
        try:
            # The machine, which is to connect, is whoever its folder was given to.
            uid = ownership.owner(self._directory)
            if uid != ownership.owner(self._path):
                ownership.give(self._path, uid)
            with kernel_call(f"listen on {self._path}"):
                self._server = await asyncio.start_unix_server(self._greet, sock=listening)
        except BaseException:
            listening.close()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        if self._booted is not None:
            self._booted.cancel()
        files.remove_file(self._path)

    async def booted(self, timeout_s: float) -> str:
        """Return the agent's version when it has booted.

        Raises:
            EngineTimeout: It did not within `timeout_s`.
            EngineExited: The machine ended first; the message has the reason.
        """
        if self._booted is None:
            raise EngineError("no listener for this machine's agent")
        watch = await Watch.open(self._directory / CONTROL_SOCKET, self._ended)
        try:
            async with deadline(timeout_s, "the guest did not boot to its agent"):
                return await self._booted
        finally:
            watch.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear one connection out; a guest may send anything, only the right words count."""
        decoder = FrameDecoder()
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                while not (frames := decoder.feed(await reader.read(GREETING_BYTES_MAX))):
                    if reader.at_eof():
                        return
            if frames[0].kind is not Kind.EVENT:
                return
            said = Booted.read(frames[0].members(), "boot")
        except (EngineError, OSError, TimeoutError):
            return
        finally:
            writer.transport.abort()
        if self._booted and not self._booted.done():
            self._booted.set_result(said.version)

    def _ended(self, reason: str) -> None:
        if self._booted and not self._booted.done():
            self._booted.set_exception(EngineExited(f"the machine ended as it booted: {reason}"))
