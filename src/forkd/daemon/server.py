"""Listen on a Unix socket, on TCP, or on both, until told to stop.

One process, one event loop, one service, and a server for each address.  The Unix socket asks
for no token, because its mode already says who may open it; TCP always does.

A socket file left by a daemon that died is replaced; one that answers is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from forkd.daemon.auth import BySocket, ByToken, ServedNames, obtain_token
from forkd.daemon.clients import HEADER_BYTES_MAX, TCP, UNIX
from forkd.daemon.connections import Gate
from forkd.daemon.logins import FailedLogins
from forkd.daemon.requests import Requests
from forkd.errors import Conflict
from forkd.host import files, signals, sockets
from forkd.limits import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from starlette.types import ASGIApp

    from forkd.daemon.clients import ClientLimits
    from forkd.daemon.settings import Settings
    from forkd.service.tokens import Tokens

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
async def listening(
    app: ASGIApp,
    settings: Settings,
    tokens: Tokens,
    *,
    unix: ClientLimits = UNIX,
    tcp: ClientLimits = TCP,
) -> AsyncIterator[list[str]]:
    """Serve `app` for as long as the context lasts, which gives the URLs it answers at.

    Args:
        app: What answers.
        settings: Where to listen, and who may ask.
        tokens: Of whom may ask over TCP.
        unix: What the clients of the Unix socket may take.
        tcp: What the clients of TCP may take.

    Raises:
        Conflict: Another daemon listens there.
        HostError: The kernel refused an address.
        InvalidRequest: The token file is unusable, or others may read it.
    """
    with contextlib.ExitStack() as stack:
        served = [
            *_unix(app, settings, tokens, unix, stack),
            *_tcp(app, settings, tokens, tcp, stack),
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each.server.serve([each.bound])) for each in served]
            try:
                yield [each.url for each in served]
            finally:
                for each in served:
                    each.server.should_exit = True
                await asyncio.wait(tasks)


async def until_told_to_stop() -> None:
    """Return on SIGTERM or SIGINT."""
    told = asyncio.Event()
    with signals.on_stop_within(told.set):
        await told.wait()


@dataclass(frozen=True, slots=True)
class _Served:
    """A server and the address that it serves."""

    server: _Server
    bound: sockets.Socket
    url: str


def _unix(
    app: ASGIApp,
    settings: Settings,
    tokens: Tokens,
    limits: ClientLimits,
    stack: contextlib.ExitStack,
) -> Iterator[_Served]:
    if settings.socket is not None:
        bound = stack.enter_context(_unix_socket(settings.socket, settings.socket_mode))
        requests = Requests(app, BySocket(), limits, tokens.telemetry)
        server = _server(requests, limits)
        yield _Served(server, bound, f"unix://{settings.socket}")


def _tcp(
    app: ASGIApp,
    settings: Settings,
    tokens: Tokens,
    limits: ClientLimits,
    stack: contextlib.ExitStack,
) -> Iterator[_Served]:
    if settings.bind is None:
        return
    names = ServedNames(settings.bind.host, settings.hosts)
    who = ByToken(obtain_token(settings), tokens, names, FailedLogins(limits.login_delay_s))
    bound = stack.enter_context(sockets.bind_tcp(settings.bind.host, settings.bind.port, BACKLOG))
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    requests = Requests(app, who, limits, tokens.telemetry)
    yield _Served(_server(requests, limits), bound, f"http://{shown}:{port}")


def _server(app: ASGIApp, limits: ClientLimits) -> _Server:
    gate = Gate(
        limits,
        app=app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=HEADER_BYTES_MAX,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
        ws_max_size=MESSAGE_BYTES_MAX,
        ws_ping_interval=WS_PING_INTERVAL_S,
        ws_ping_timeout=WS_PING_TIMEOUT_S,
        ws_per_message_deflate=False,
    )
    return _Server(gate)


@contextlib.contextmanager
def _unix_socket(path: Path, mode: int) -> Iterator[sockets.Socket]:
    _remove_stale(path)
    with sockets.bind_unix(path, mode, BACKLOG) as bound:
        try:
            yield bound
        finally:
            files.remove_file(path)


def _remove_stale(path: Path) -> None:
    """Remove a socket file that a daemon left which has ended.

    Raises:
        Conflict: One listens there.
    """
    match sockets.is_served(path):
        case True:
            raise Conflict(f"another daemon listens on {path}")
        case False:
            log.warning("replacing a socket left by a daemon that ended", extra={"path": str(path)})
            files.remove_file(path)
