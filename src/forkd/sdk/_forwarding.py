"""Ports of this host whose connections go to a program in a sandbox, by hand in both flavours.

Each connection has a WebSocket of its own; the daemon says how many a sandbox may have.  One that
the daemon refuses is reset, and so is one that breaks.  The synchronous flavour has a thread with
an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING, Self, TypeVar

from forkd import listeners
from forkd.errors import Conflict, ForkdError, InvalidRequest
from forkd.limits import PORT_MAX
from forkd.sdk._transport import async_socket

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from forkd.sdk._endpoint import Endpoint
    from forkd.sdk._transport import AsyncSocket

T = TypeVar("T")

PIECE_BYTES = 64 * 1024
"""Most bytes of a connection that are passed on at once."""

BACKLOG = 1024
"""Connections that the kernel holds until they are accepted."""

_RESET = struct.pack("ii", 1, 0)
"""Has closing a socket reset its connection (SO_LINGER)."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address of this host; port 0 is a free one.

    Raises:
        InvalidRequest: The address is none, none of this host's, or needs root.
        Conflict: Another program has it.
    """
    where = _address(host)
    if not 0 <= port <= PORT_MAX:
        raise InvalidRequest(f"host_port must be 0 to {PORT_MAX}, not {port}", field="host_port")
    family = socket.AF_INET if where.version == 4 else socket.AF_INET6  # noqa: PLR2004 - IPv4
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(where), port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _unavailable(str(where), port, error) from error
    return listener


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise InvalidRequest(
            f"{host!r} is not an address to listen on, such as 127.0.0.1 or ::1", field="host"
        ) from None


def _unavailable(host: str, port: int, error: OSError) -> ForkdError:
    if error.errno == errno.EADDRINUSE:
        return Conflict(
            f"port {port} of {host} is {listeners.in_use(host, port)} on this host: name another "
            "port, or 0 for a free one"
        )
    if error.errno == errno.EACCES:
        return InvalidRequest(
            f"port {port} needs root on this host, as low ports do: name another port, or 0 for a "
            "free one",
            field="host_port",
        )
    words = os.strerror(error.errno or 0)
    return InvalidRequest(f"cannot listen on {host}, port {port}: {words}", field="host")


def shown(host: str, port: int) -> str:
    """Return an address as it is typed: `127.0.0.1:80`, `[::1]:80`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class AsyncForward:
    """A port of this host, forwarded to a program in a sandbox while the context lasts.

        async with sandbox.forward(8000) as forward:
            print(f"http://{forward.address}/")

    Any number of connections are forwarded at once, up to the daemon's limits.

    Attributes:
        host: The address it listens on; once it is entered.
        port: The port of this host; once it is entered.
        guest_port: The port in the sandbox.
    """

    host: str
    port: int

    def __init__(
        self,
        endpoint: Endpoint,
        path: str,
        guest_port: int,
        opened: Callable[[], socket.socket],
        on_error: Callable[[ForkdError], object] | None,
    ) -> None:
        self.guest_port = guest_port
        self._endpoint = endpoint
        self._path = path
        self._opened = opened
        self._on_error = on_error
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None] | None] = set()

    @property
    def address(self) -> str:
        """Where it listens, such as `127.0.0.1:40123`."""
        return shown(self.host, self.port)

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            InvalidRequest: The address is none, none of this host's, or needs root.
            Conflict: Another program listens there.
        """
        listener = self._opened()
        self.host, self.port = listener.getsockname()[:2]
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=PIECE_BYTES)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening, and reset the connections that are left.  Idempotent."""
        if self._server is not None:
            self._server.close()
        left = tuple(self._connections)
        for each in left:
            if each not in self._closing:
                each.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(serving)
        serving.add_done_callback(self._connections.discard)
        serving.add_done_callback(self._closing.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            program = await async_socket(self._endpoint, self._path)
            try:
                await _relay(reader, writer, program)
            finally:
                self._closing.add(asyncio.current_task())  # which is not interrupted
                await program.aclose()
            writer.close()
        except ForkdError as error:
            _reset(writer)
            if self._on_error is not None:
                self._on_error(error)
        except OSError:  # the client has gone
            _reset(writer)
        except asyncio.CancelledError:
            _reset(writer)
            raise


async def _relay(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, program: AsyncSocket
) -> None:
    async def there() -> None:
        while data := await reader.read(PIECE_BYTES):
            await program.send(data)
        await program.send(b"")

    async def back() -> None:
        while data := await program.receive():
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(there())
            group.create_task(back())
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None


def _reset(writer: asyncio.StreamWriter) -> None:
    """Have the client see that the connection broke, rather than that it ended."""
    found: socket.socket | None = writer.get_extra_info("socket")
    if found is not None:
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


class Forward:
    """A port of this host, forwarded to a program in a sandbox while the context lasts.

        with sandbox.forward(8000) as forward:
            print(f"http://{forward.address}/")

    Any number of connections are forwarded at once, up to the daemon's limits, by a thread.

    Attributes:
        guest_port: The port in the sandbox.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        path: str,
        guest_port: int,
        opened: Callable[[], socket.socket],
        on_error: Callable[[ForkdError], object] | None,
    ) -> None:
        self.guest_port = guest_port
        self._made = AsyncForward(endpoint, path, guest_port, opened, on_error)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def host(self) -> str:
        """The address it listens on; once it is entered."""
        return self._made.host

    @property
    def port(self) -> int:
        """The port of this host; once it is entered."""
        return self._made.port

    @property
    def address(self) -> str:
        """Where it listens, such as `127.0.0.1:40123`."""
        return self._made.address

    def __enter__(self) -> Self:
        """Listen.

        Raises:
            InvalidRequest: The address is none, none of this host's, or needs root.
            Conflict: Another program listens there.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="forkd-forward", daemon=True
        )
        self._thread.start()
        try:
            self._do(self._made.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and reset the connections that are left.  Idempotent."""
        if self._loop is None or self._thread is None:
            return
        self._do(self._made.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None

    def _do(self, work: Coroutine[object, object, T]) -> T:
        """Return what the thread's loop gives."""
        assert self._loop is not None  # noqa: S101 - the callers have made it
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
