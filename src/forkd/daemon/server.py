"""Listen on a Unix socket, on TCP, or on both, until told to stop.

One process, one event loop, one service, and a server for each address.  The Unix socket asks
for no token, because its mode already says who may open it; TCP always does.

A socket file left by a daemon that died is replaced; one that answers is not.  Sockets that a
service manager has opened are served in their place, and stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from errno import EADDRINUSE
from typing import TYPE_CHECKING, Any

import uvicorn

from forkd import listeners
from forkd.daemon.activation import HandedSockets
from forkd.daemon.auditing import Auditor
from forkd.daemon.auth import BySocket, ByToken, FileToken, ServedNames, obtain_token
from forkd.daemon.clients import HEADER_BYTES_MAX, TCP, UNIX
from forkd.daemon.connections import Gate
from forkd.daemon.handshakes import TlsGate
from forkd.daemon.logins import FailedLogins
from forkd.daemon.reloading import Reloads
from forkd.daemon.requests import Requests
from forkd.daemon.tls import certificates
from forkd.errors import Conflict, HostError
from forkd.host import files, signals, sockets
from forkd.limits import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from starlette.types import ASGIApp

    from forkd.daemon.clients import ClientLimits
    from forkd.daemon.settings import Bind, Settings
    from forkd.daemon.tls import Certificates
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

    def stop(self) -> None:
        """Serve no more clients; those that are served are, to their end."""
        self.should_exit = True
        if isinstance(self.config, TlsGate):
            self.config.end_greetings()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def listening(  # noqa: PLR0913 - each is for tests to set
    app: ASGIApp,
    settings: Settings,
    tokens: Tokens,
    *,
    unix: ClientLimits = UNIX,
    tcp: ClientLimits = TCP,
    auditor: Auditor | None = None,
    reloads: Reloads | None = None,
    handed: HandedSockets | None = None,
) -> AsyncIterator[list[str]]:
    """Serve `app` for as long as the context lasts, which gives the URLs it answers at.

    Args:
        app: What answers.
        settings: Where to listen, and who may ask.
        tokens: Of whom may ask over TCP.
        unix: What the clients of the Unix socket may take.
        tcp: What the clients of TCP may take.
        auditor: Writes each request down.
        reloads: Is told what can be read again: the token and the certificates of TCP.
        handed: What listens at these addresses already.

    Raises:
        Conflict: Another daemon, or another program, listens there.
        HostError: The kernel refused an address.
        InvalidRequest: A file of a token or of TLS is unusable, or others may read it.
    """
    auditor = auditor or Auditor()
    reloads = reloads or Reloads(auditor, settings)
    handed = handed or HandedSockets()
    who, tls = None, None
    # What is wrong with a file is found before anything listens.
    if settings.bind is not None:
        who = _by_token(settings, tokens, tcp, reloads)
    if (tls := certificates(settings)) is not None:
        reloads.add("tls", lambda: tls.reload(reloads.settings))
    with contextlib.ExitStack() as stack:
        asked = Requests(app, BySocket(), unix, tokens.telemetry, auditor)
        served = list(_unix(asked, settings, unix, handed, stack))
        if who is not None:
            asked = Requests(app, who, tcp, tokens.telemetry, auditor)
            served.append(_tcp(asked, settings, tls, tcp, auditor, handed, stack))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each.server.serve([each.bound])) for each in served]
            try:
                yield [each.url for each in served]
            finally:
                for each in served:
                    each.server.stop()
                await asyncio.wait(tasks)


@contextlib.contextmanager
def told_to_stop() -> Iterator[asyncio.Event]:
    """Give an event that SIGTERM and SIGINT set within the block, instead of ending us."""
    told = asyncio.Event()
    with signals.on_stop_within(told.set):
        yield told


@dataclass(frozen=True, slots=True)
class _Served:
    """A server and the address that it serves."""

    server: _Server
    bound: sockets.Socket
    url: str


def _unix(
    app: ASGIApp,
    settings: Settings,
    limits: ClientLimits,
    handed: HandedSockets,
    stack: contextlib.ExitStack,
) -> Iterator[_Served]:
    if settings.socket is not None:
        bound = stack.enter_context(handed.unix or _unix_socket(settings))
        server = _Server(Gate(limits, **_options(app)))
        yield _Served(server, bound, f"unix://{settings.socket}")


def _by_token(
    settings: Settings, tokens: Tokens, limits: ClientLimits, reloads: Reloads
) -> ByToken:
    assert settings.bind is not None  # noqa: S101 - `listening` has looked
    token = FileToken(obtain_token(settings))
    reloads.add("token_file", lambda: token.change(obtain_token(reloads.settings)))
    names = ServedNames(settings.bind.host, settings.hosts)
    return ByToken(token, tokens, names, FailedLogins(limits.login_delay_s))


def _tcp(  # noqa: PLR0913, PLR0917 - what an address has
    app: ASGIApp,
    settings: Settings,
    tls: Certificates | None,
    limits: ClientLimits,
    auditor: Auditor,
    handed: HandedSockets,
    stack: contextlib.ExitStack,
) -> _Served:
    assert settings.bind is not None  # noqa: S101 - `listening` has looked
    bound = stack.enter_context(handed.tcp or _tcp_socket(settings.bind))
    host, port = bound.getsockname()[:2]
    if tls is None:
        server, scheme = _Server(Gate(limits, **_options(app))), "http"
    else:
        server, scheme = _Server(TlsGate(limits, tls, auditor, **_options(app))), "https"
    return _Served(server, bound, f"{scheme}://{_shown(host, port)}")


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tcp_socket(at: Bind) -> sockets.Socket:
    try:
        return sockets.bind_tcp(at.host, at.port, BACKLOG)
    except HostError as error:
        if error.context.get("errno") != EADDRINUSE:
            raise
        raise Conflict(
            f"cannot listen on {_shown(at.host, at.port)}, which is "
            f"{listeners.in_use(at.host, at.port)}: end that program, or set FORKD_BIND to "
            "another port",
            field="bind",
        ) from error


def _options(app: ASGIApp) -> dict[str, Any]:
    """Return what uvicorn is told for each address."""
    return {
        "app": app,
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # a client does not say where it is
        "backlog": BACKLOG,
        "h11_max_incomplete_event_size": HEADER_BYTES_MAX,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": DRAIN_TIMEOUT_S,
        "ws_max_size": MESSAGE_BYTES_MAX,
        "ws_ping_interval": WS_PING_INTERVAL_S,
        "ws_ping_timeout": WS_PING_TIMEOUT_S,
        "ws_per_message_deflate": False,
    }


@contextlib.contextmanager
def _unix_socket(settings: Settings) -> Iterator[sockets.Socket]:
    path, group = settings.socket, settings.group_of_socket()
    assert path is not None  # noqa: S101 - the caller has looked
    _remove_stale(path)
    with sockets.bind_unix(path, settings.socket_mode, BACKLOG, group) as bound:
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
