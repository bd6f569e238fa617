"""A Unix socket that carries frames.

`Channel` is a thin pair of stream reader and writer.  Losing the peer is always
`EngineExited`, and a missed deadline `EngineTimeout`, whichever call notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Self

from forkd.engine.frames import (
    HEADER_BYTES,
    Frame,
    Kind,
    decode_header,
    encode,
    encode_json,
)
from forkd.errors import EngineExited, EngineTimeout

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from pathlib import Path
    from types import TracebackType

CONNECT_TIMEOUT_S = 10.0
"""How long a VMM may take to accept a connection: it does nothing else meanwhile."""

READ_BUFFER_BYTES = 256 * 1024
"""How much of a stream waits in memory for its reader; twice this at most."""

_UCRED = struct.Struct("iII")


class Channel:
    """One connection; use it from one task at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, path: Path) -> Self:
        """Connect to the socket at `path`.

        Raises:
            EngineExited: Nobody listens there.
            EngineTimeout: Nobody accepted within `CONNECT_TIMEOUT_S`.
        """
        try:
            async with deadline(CONNECT_TIMEOUT_S, f"{path.name} accepted no connection"):
                reader, writer = await asyncio.open_unix_connection(path, limit=READ_BUFFER_BYTES)
        except OSError as error:
            raise EngineExited(f"nobody listens at {path}: {error.strerror}") from error
        return cls(reader, writer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def ended(self) -> bool:
        """Whether the connection is known to be of no further use."""
        return self._reader.at_eof() or self._writer.is_closing()

    def peer_pid(self) -> int:
        """Return the process that listens at the other end, as the kernel knows it."""
        sock: socket.socket = self._writer.get_extra_info("socket")
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, _, _ = _UCRED.unpack(raw)
        return int(pid)

    def close(self) -> None:
        """Let go of the connection, without waiting for what was not yet sent."""
        self._writer.transport.abort()

    async def line(self, text: str, bytes_max: int) -> str:
        """Send a line and return the one that answers it, both without their ends.

        Raises:
            EngineExited: The peer is gone, or answers with more than `bytes_max` bytes.
        """
        try:
            self._writer.write(text.encode() + b"\n")
            answer = await self._reader.readuntil(b"\n")
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise EngineExited(f"the connection ended in answer to {text!r}") from error
        if len(answer) > bytes_max:
            raise EngineExited(f"the answer to {text!r} is no line")
        return answer.decode(errors="replace").rstrip("\n")

    async def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a frame; returns when the peer has room for more.

        Raises:
            EngineExited: The peer is gone.
            EngineError: The payload is too long.
        """
        await self._write(encode(kind, payload))

    async def send_json(self, kind: Kind, members: Mapping[str, object]) -> None:
        """Send a JSON frame; as `send`."""
        await self._write(encode_json(kind, members))

    async def receive(self) -> Frame:
        """Return the next frame.

        Raises:
            EngineExited: The peer is gone.
            EngineError: It sent what is no frame.
        """
        try:
            kind, length = decode_header(await self._reader.readexactly(HEADER_BYTES))
            return Frame(kind, await self._reader.readexactly(length) if length else b"")
        except (OSError, asyncio.IncompleteReadError) as error:
            raise EngineExited("the machine ended the connection") from error

    async def _write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise EngineExited("the machine ended the connection") from error


@contextlib.asynccontextmanager
async def deadline(timeout_s: float | None, complaint: str) -> AsyncGenerator[None, None]:
    """Run the block for at most `timeout_s` seconds; for ever if None.

    Raises:
        EngineTimeout: The time was over; the message is `complaint` and the limit.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise EngineTimeout(f"{complaint} within {timeout_s:g} s") from error
