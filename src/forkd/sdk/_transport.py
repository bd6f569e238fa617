"""What cannot be translated: the connections themselves, written by hand in both flavours.

Everything above this module exists once, in `_async`; `tools/async_to_sync.py` makes `_sync` of
it.  A pair here has the same methods, and its errors are forkd's: a daemon that cannot be
reached, and a connection that breaks, are both `TransportError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from websockets.asyncio.client import connect as async_connect
from websockets.asyncio.client import unix_connect as async_unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import connect as sync_connect
from websockets.sync.client import unix_connect as sync_unix_connect

from forkd.errors import ForkdError, TransportError
from forkd.limits import MESSAGE_BYTES_MAX
from forkd.sdk import _tls
from forkd.sdk._errors import from_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from websockets.asyncio.client import ClientConnection as AsyncConnection
    from websockets.sync.client import ClientConnection as SyncConnection

    from forkd.sdk._endpoint import Endpoint

CONNECT_TIMEOUT_S = 10.0
"""Time to reach the daemon; once reached, each call says how long its answer may take."""

OPEN_TIMEOUT_S = 60.0
"""Time for the first answer of a WebSocket, which a busy daemon may be slow to give."""

CLOSE_TIMEOUT_S = 0.5
"""Time for the daemon's part of a close: it comes behind all output that nobody reads any more."""

CONNECTIONS_MAX = 256
"""Requests in flight at once; more wait their turn, however long that takes."""

PING_INTERVAL_S = 30.0
"""How often a WebSocket over TCP asks the daemon whether it is there, as the daemon asks us."""

PING_TIMEOUT_S = 300.0
"""How long the answer may take; it comes behind all output that was not read yet."""

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
        if hasattr(socket, name)
    ),
)
"""Has the kernel end a connection whose host has been gone for a minute and a half.

Answers without a deadline, such as a bake's, would be waited for for ever: after a power loss or a
suspended VPN nobody sends the end of the connection."""

_LIMITS = httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=32)


def timeout(answer_s: float | None) -> httpx.Timeout:
    """Return the timeouts of a request whose answer may take `answer_s`; None: for ever."""
    return httpx.Timeout(answer_s, connect=CONNECT_TIMEOUT_S, pool=None)


def async_http(endpoint: Endpoint) -> httpx.AsyncClient:
    """Return a client of `endpoint`, which ignores proxies: the daemon is never behind one."""
    return httpx.AsyncClient(
        base_url=endpoint.http_url,
        headers=endpoint.headers,
        transport=httpx.AsyncHTTPTransport(**_transport_options(endpoint)),
        trust_env=False,
    )


def sync_http(endpoint: Endpoint) -> httpx.Client:
    """Return a client of `endpoint`, as `async_http`."""
    return httpx.Client(
        base_url=endpoint.http_url,
        headers=endpoint.headers,
        transport=httpx.HTTPTransport(**_transport_options(endpoint)),
        trust_env=False,
    )


def _transport_options(endpoint: Endpoint) -> dict[str, Any]:
    """Return how to connect; certificates, which take 30 ms to load, only where there is TLS."""
    verify = _tls.context(endpoint) or False
    return {
        "uds": endpoint.socket,
        "limits": _LIMITS,
        "trust_env": False,
        "verify": verify,
        "socket_options": KEEPALIVE if endpoint.socket is None else None,
    }


def answer_nothing(request: httpx.Request) -> httpx.Response:
    """Return the empty answer of a request that was done already."""
    return httpx.Response(204, request=request)


def was_unsent(error: TransportError) -> bool:
    """Return whether the daemon was never reached, so that it has done nothing."""
    return isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)


def was_lost(error: TransportError) -> bool:
    """Return whether the connection broke, so that the daemon may have done it, or not."""
    broken = httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError
    return isinstance(error.__cause__, broken)


@contextlib.contextmanager
def transport_errors(endpoint: Endpoint) -> Iterator[None]:
    """Raise what goes wrong between us and the daemon as `TransportError`."""
    try:
        yield
    except httpx.ConnectError as error:
        raise TransportError(_unreached(endpoint, error)) from error
    except httpx.RemoteProtocolError as error:
        raise TransportError(_gone(endpoint)) from error
    except httpx.TimeoutException as error:
        raise TransportError(f"{endpoint.url} did not answer in time") from error
    except (httpx.HTTPError, httpx.StreamError, ssl.SSLError) as error:
        said = _tls.advice(endpoint.url, error)
        raise TransportError(said or f"the connection to {endpoint.url} broke: {error}") from error


async def async_pieces(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what `pieces` gives, which is read from files in another thread."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def sync_pieces(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what `pieces` gives."""
    return pieces


async def async_pause(time_s: float) -> None:
    """Return after some time."""
    await asyncio.sleep(time_s)


def sync_pause(time_s: float) -> None:
    """Return after some time."""
    time.sleep(time_s)


class AsyncSocket:
    """A WebSocket of binary messages."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def send(self, message: bytes) -> None:
        """Send one message; waits while the other side has no room."""
        try:
            await self._connection.send(message)
        except ConnectionClosed as error:
            raise _broken(error) from error

    async def receive(self) -> bytes:
        """Return the next message."""
        try:
            return await self._connection.recv(decode=False)
        except ConnectionClosed as error:
            raise _broken(error) from error

    async def aclose(self) -> None:
        """Close; idempotent."""
        await self._connection.close()


class SyncSocket:
    """A WebSocket of binary messages; one thread may receive while others send."""

    def __init__(self, connection: SyncConnection) -> None:
        self._connection = connection

    def send(self, message: bytes) -> None:
        """Send one message; waits while the other side has no room."""
        try:
            self._connection.send(message)
        except ConnectionClosed as error:
            raise _broken(error) from error

    def receive(self) -> bytes:
        """Return the next message."""
        try:
            return self._connection.recv(decode=False)
        except ConnectionClosed as error:
            raise _broken(error) from error

    def close(self) -> None:
        """Close; idempotent."""
        self._connection.close()


async def async_socket(endpoint: Endpoint, path: str) -> AsyncSocket:
    """Open a WebSocket.

    Raises:
        ForkdError: The daemon refused, or cannot be reached.
    """
    url, options = endpoint.websocket_url + path, _socket_options(endpoint)
    try:
        if endpoint.socket is not None:
            return AsyncSocket(await async_unix_connect(endpoint.socket, url, **options))
        tls = _tls.context(endpoint)
        return AsyncSocket(await async_connect(url, proxy=None, ssl=tls, **options))
    except (OSError, InvalidHandshake, TimeoutError) as error:
        raise _refused(endpoint, error) from error


def sync_socket(endpoint: Endpoint, path: str) -> SyncSocket:
    """Open a WebSocket, as `async_socket`."""
    url, options = endpoint.websocket_url + path, _socket_options(endpoint)
    try:
        if endpoint.socket is not None:
            connection = sync_unix_connect(endpoint.socket, url, **options)
        else:
            connection = sync_connect(url, proxy=None, ssl=_tls.context(endpoint), **options)
        return SyncSocket(connection.__enter__())  # its `__exit__` is `close`
    except (OSError, InvalidHandshake, TimeoutError) as error:
        raise _refused(endpoint, error) from error


def _socket_options(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "additional_headers": endpoint.headers,
        "compression": None,
        "max_size": MESSAGE_BYTES_MAX,
        "open_timeout": OPEN_TIMEOUT_S,
        "ping_interval": PING_INTERVAL_S if endpoint.socket is None else None,
        "ping_timeout": PING_TIMEOUT_S,
        "close_timeout": CLOSE_TIMEOUT_S,
    }


def _broken(error: ConnectionClosed) -> TransportError:
    return TransportError(f"the connection to the daemon broke: {error}")


def _refused(endpoint: Endpoint, error: Exception) -> ForkdError:
    if isinstance(error, InvalidStatus):
        return from_answer(error.response.status_code, bytes(error.response.body or b""))
    return TransportError(_unreached(endpoint, error))


def _gone(endpoint: Endpoint) -> str:
    return (
        f"the daemon at {endpoint.url} ended the connection before its answer was whole: it was "
        "stopped or restarted, or what it answered with ended; sandboxes outlive a daemon"
    )


def _unreached(endpoint: Endpoint, error: Exception) -> str:
    if endpoint.socket is not None and _has_errno(error, errno.EACCES):
        return (
            f"{endpoint.socket} is closed to you: join its group "
            f"(`sudo usermod --append --groups {_group_of(endpoint.socket)} $USER`, then log in "
            "again), or start a daemon of your own with FORKD_HOME set and `forkd up`"
        )
    said = _tls.advice(endpoint.url, error)
    return said or f"no daemon answers at {endpoint.url} ({error}); `forkd up` starts one"


def _has_errno(error: BaseException | None, number: int) -> bool:
    """Whether the kernel refused with this number, somewhere under `error`."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == number:
            return True
        error = error.__cause__ or error.__context__
    return False


def _group_of(path: str) -> str:
    try:
        return Path(path).group()
    except (OSError, KeyError, NotImplementedError):
        return "forkd"
