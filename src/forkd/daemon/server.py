"""Listen on a Unix socket, on TCP, or on both, until told to stop.

One process, one event loop, one service, and a server for each address.  The Unix socket asks
for no token, because its mode already says who may open it; TCP always does if there is one.

A socket file left by a daemon that died is replaced; one that answers is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING

import uvicorn

from forkd.daemon.auth import RequireToken, read_token
from forkd.errors import Conflict, HostError
from forkd.limits import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from starlette.types import ASGIApp

    from forkd.daemon.settings import Bind, Settings

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections the kernel holds for us while we are busy; a fork of 1,000 evals arrives at once."""

DRAIN_TIMEOUT_S = 10
"""Time that requests in progress have to end once the daemon was told to stop."""

WS_PING_INTERVAL_S = 30.0
WS_PING_TIMEOUT_S = 300.0
"""A client that does not answer pings this long is gone.  Long, because a host with a thousand
machines waking up may not run one of its processes for many seconds."""

KEEP_ALIVE_S = 75
"""Idle connections are kept longer than clients keep theirs, so that it is never us who closes."""


class _Server(uvicorn.Server):
    """A server that leaves signals alone: `serve` handles them once for all servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, settings: Settings) -> AsyncIterator[list[str]]:
    """Serve `app` for as long as the context lasts, which gives the URLs it answers at.

    Raises:
        Conflict: Another daemon listens there.
        HostError: The kernel refused an address.
        InvalidRequest: The token file is unusable.
    """
    with contextlib.ExitStack() as stack:
        served = [*_unix(app, settings, stack), *_tcp(app, settings, stack)]
        servers = [_server(each) for each, _, _ in served]
        async with asyncio.TaskGroup() as group:
            pairs = list(zip(servers, served, strict=True))
            tasks = [group.create_task(one.serve([bound])) for one, (_, bound, _) in pairs]
            try:
                yield [url for _, _, url in served]
            finally:
                for server in servers:
                    server.should_exit = True
                await asyncio.wait(tasks)


async def until_told_to_stop() -> None:
    """Return on SIGTERM or SIGINT."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    try:
        await told.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _server(app: ASGIApp) -> _Server:
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
        ws_max_size=MESSAGE_BYTES_MAX,
        ws_ping_interval=WS_PING_INTERVAL_S,
        ws_ping_timeout=WS_PING_TIMEOUT_S,
        ws_per_message_deflate=False,
    )
    return _Server(config)


_Served = tuple["ASGIApp", socket.socket, str]


def _unix(app: ASGIApp, settings: Settings, stack: contextlib.ExitStack) -> Iterator[_Served]:
    if settings.socket is not None:
        bound = stack.enter_context(_unix_socket(settings.socket, settings.socket_mode))
        yield app, bound, f"unix://{settings.socket}"


def _tcp(app: ASGIApp, settings: Settings, stack: contextlib.ExitStack) -> Iterator[_Served]:
    if settings.bind is None:
        return
    if settings.token_file is not None:
        app = RequireToken(app, read_token(settings.token_file))
    bound = stack.enter_context(_tcp_socket(settings.bind))
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    yield app, bound, f"http://{shown}:{port}"


@contextlib.contextmanager
def _unix_socket(path: Path, mode: int) -> Iterator[socket.socket]:
    with _bound_unix_socket(path, mode) as bound:
        try:
            yield bound
        finally:
            path.unlink(missing_ok=True)


def _bound_unix_socket(path: Path, mode: int) -> socket.socket:
    """Bind `path` under its final mode, so that it is never open to more than it should be."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o777 & ~mode)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        bound.bind(str(path))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise HostError(f"cannot listen on {path}: {error}") from error
    except Conflict:
        bound.close()
        raise
    finally:
        os.umask(mask)
    return bound


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            log.warning("replacing %s, left by a daemon that ended", path)
            path.unlink(missing_ok=True)
            return
    raise Conflict(f"another daemon listens on {path}")


@contextlib.contextmanager
def _tcp_socket(bind: Bind) -> Iterator[socket.socket]:
    try:
        family = socket.getaddrinfo(bind.host, bind.port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((bind.host, bind.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise HostError(f"cannot listen on {bind.host}:{bind.port}: {error}") from error
    with bound:
        yield bound
