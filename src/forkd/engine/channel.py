"""A Unix socket that carries frames.

Losing the peer is always `EngineExited`, and a missed deadline `EngineTimeout`, whichever
call notices; what the kernel refuses besides is a `HostError` or a `CapacityError`.  Reading and
writing are independent: what the peer said before it went away can still be read after a write has
failed, because that is where it said why.  For this the socket is used directly; a stream's
transport drops what is unread when a write fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self, TypeAlias

from forkd.engine.frames import Frame, FrameDecoder, Kind, encode, encode_json
from forkd.errors import EngineExited, EngineTimeout
from forkd.host import sockets
from forkd.host.faults import host_error

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Awaitable,
        Callable,
        Generator,
        Mapping,
        Sequence,
    )
    from pathlib import Path
    from types import TracebackType

    from forkd.host.sockets import Socket

Explain: TypeAlias = "Callable[[EngineExited], Awaitable[EngineExited]]"
"""Returns a loss of the peer with its reason."""

CONNECT_TIMEOUT_S = 10.0
"""How long a VMM may take to accept a connection: it does nothing else meanwhile."""

READ_BYTES = 256 * 1024
"""How much is read at once: a quarter of the largest frame."""


class Channel:
    """One connection; one task may read and others write at the same time."""

    def __init__(self, sock: Socket, explain: Explain | None = None) -> None:
        """Take over a connected socket, which must not block; `explain` as of `connect`."""
        self._sock = sock
        self._explain = explain
        self._decoder = FrameDecoder()
        self._frames: list[Frame] = []
        self._writing = asyncio.Lock()
        self._users = 0
        self._closed = False

    @classmethod
    async def connect(cls, path: Path, explain: Explain | None = None) -> Self:
        """Connect to the socket at `path`.

        Args:
            path: Where the peer listens.
            explain: Returns what to raise for a loss of the peer, once it knows why.

        Raises:
            EngineExited: Nobody listens there.
            EngineTimeout: Nobody accepted within `CONNECT_TIMEOUT_S`.
            CapacityError: There are too many open files, or too little memory.
        """
        try:
            return cls(await connected(path), explain)
        except EngineExited as error:
            if explain is None:
                raise
            raise await explain(error) from error

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
    def idle(self) -> bool:
        """Whether the connection is open and the peer has said nothing that was not read."""
        if self._closed or self._frames or self._decoder.pending:
            return False
        return not sockets.has_input(self._sock)

    def peer_pid(self) -> int:
        """Return the process that listens at the other end, as the kernel knows it."""
        pid, _, _ = sockets.peer_credentials(self._sock)
        return pid

    def close(self) -> None:
        """Let go of the connection; whoever uses it now gets `EngineExited`.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        sockets.shut_down(self._sock)
        if self._users == 0:
            self._sock.close()

    async def line(self, text: str, bytes_max: int) -> str:
        """Send a line and return the one that answers it, both without their ends.

        Raises:
            EngineExited: The peer is gone, or answers with more than `bytes_max` bytes.
        """
        answer = b""
        async with self._explained():
            await self._write(text.encode() + b"\n")
            while not answer.endswith(b"\n") and len(answer) <= bytes_max:
                # Byte by byte: what follows the line belongs to the frames.
                answer += await self._read(1)
        if len(answer) > bytes_max:
            raise EngineExited(f"the answer to {text!r} is no line")
        return answer.decode(errors="replace").rstrip("\n")

    async def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a frame; returns when the peer has room for it.

        Raises:
            EngineExited: The peer is gone.
            EngineError: The payload is too long.
        """
        async with self._explained():
            await self._write(encode(kind, payload))

    async def send_files(
        self, kind: Kind, members: Mapping[str, object], files: Sequence[int]
    ) -> None:
        """Send a JSON frame with descriptors, which stay ours as well; as `send`.

        To be used while nothing else is on its way, so that there is room for it.
        """
        data = encode_json(kind, members)
        async with self._writing:
            with self._use():
                sent = sockets.send_files(self._sock, data, files)
        if sent < len(data):
            await self._write(data[sent:])

    async def send_json(self, kind: Kind, members: Mapping[str, object]) -> None:
        """Send a JSON frame; as `send`."""
        async with self._explained():
            await self._write(encode_json(kind, members))

    async def receive(self) -> Frame:
        """Return the next frame.

        Raises:
            EngineExited: The peer is gone.
            EngineError: It sent what is no frame.
        """
        async with self._explained():
            while not self._frames:
                self._frames = self._decoder.feed(await self._read(READ_BYTES))
        return self._frames.pop(0)

    @contextlib.asynccontextmanager
    async def _explained(self) -> AsyncGenerator[None, None]:
        """Raise a loss of the peer with its reason, unless it is we who let go."""
        try:
            yield
        except EngineExited as error:
            if self._explain is None or self._closed:
                raise
            raise await self._explain(error) from error

    async def _read(self, bytes_max: int) -> bytes:
        with self._use():
            data = await asyncio.get_running_loop().sock_recv(self._sock, bytes_max)
        if not data:
            raise EngineExited("the machine ended the connection")
        return data

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            try:
                with self._use():
                    await asyncio.get_running_loop().sock_sendall(self._sock, data)
            except EngineExited:
                raise  # what the peer said before it went away can still be read
            except BaseException:
                self.close()  # half a frame may be on its way
                raise

    @contextlib.contextmanager
    def _use(self) -> Generator[None, None, None]:
        """Keep the descriptor while the event loop knows it, and name a loss of the peer."""
        if self._closed:
            raise EngineExited("the connection is closed")
        self._users += 1
        try:
            yield
        except ConnectionError as error:
            raise EngineExited("the machine ended the connection") from error
        except OSError as error:
            raise host_error("speak with a machine", error) from error
        finally:
            self._users -= 1
            if self._closed and self._users == 0:
                self._sock.close()


async def connected(path: Path) -> Socket:
    """Return a socket that is connected to `path`; raises as `Channel.connect`."""
    async with deadline(CONNECT_TIMEOUT_S, f"{path.name} accepted no connection"):
        sock = await sockets.connected(path)
    if sock is None:
        raise EngineExited(f"nobody listens at {path}")
    return sock


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
