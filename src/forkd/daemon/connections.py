"""Connections of clients, each with a deadline for what its client owes us.

uvicorn's protocols wait for ever for a header, for a body and for a client to read, and take any
number of connections.  These are the same with the limits of `forkd.daemon.clients`, and with an
`ErrorBody` where uvicorn answers in plain text by itself.

A refused client is answered, and the connection is closed once it has read that: closing at once
would throw away an answer that it has not read yet.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from forkd.daemon.clients import LINGERING_MAX, RETRY_AFTER_S
from forkd.daemon.errors import plain, render
from forkd.daemon.fair_loop import ADMIN, whose
from forkd.daemon.peers import PEER_PID, PEER_UID, VISITOR
from forkd.daemon.visitors import Visitors
from forkd.errors import CapacityError, ForkdError
from forkd.host import sockets

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from starlette.responses import Response
    from uvicorn.server import ServerState
    from websockets.http11 import Request

    from forkd.daemon.clients import ClientLimits
    from forkd.daemon.visitors import Visitor

log = logging.getLogger(__name__)

BAD_REQUEST, REQUEST_TIMEOUT = 400, 408

NOT_READ = 1008
"""Code with which a WebSocket is closed whose client does not read: it breaks a rule of ours."""


class Gate(uvicorn.Config):
    """The configuration of the server of one address, with what its clients may take."""

    def __init__(self, limits: ClientLimits, **options: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(http=HttpConnection, ws=WebSocketConnection, **options)
        self.limits = limits
        self.lingering = 0
        self.visitors = (
            None
            if limits.strangers_max is None
            else Visitors(limits.connections_max, limits.strangers_max)
        )
        self._descriptor_max = int(sockets.descriptors_max() * limits.descriptors_share_max)

    def has_room(self, connections: int, transport: asyncio.Transport) -> bool:
        """Whether one more connection may stay, of which there are so many with it.

        The kernel gives the lowest number that is free: a socket with a high number means that
        so many descriptors are in use.
        """
        number: int = transport.get_extra_info("socket").fileno()
        return connections <= self.limits.connections_max and number < self._descriptor_max


class Deadline:
    """A time by which something must happen, or `call` is called."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        """Whether something is waited for."""
        return self._timer is not None

    def set(self, timeout_s: float) -> None:
        """Wait from now on, for so long."""
        self.clear()
        self._timer = self._loop.call_later(timeout_s, self._over)

    def clear(self) -> None:
        """Wait for nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over(self) -> None:
        self._timer = None
        self._call()


class HttpConnection(H11Protocol):
    """A connection whose client must say and read things in time."""

    config: Gate

    def __init__(
        self,
        config: Gate,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._owed = Deadline(self.loop, self._too_late)
        self._unread = Deadline(self.loop, self._not_read)
        self._lingers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Wait for the first request, or refuse the client if there is no room for it."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, **_peer(transport)}
        if not self.config.has_room(len(self.connections), transport):
            log.warning("connection refused", extra={"connections": len(self.connections)})
            self._refuse(render(too_much("connections")))
        elif not self._enter(transport):
            log.info("connection refused of an address that has too many")
            self._refuse(render(too_much("connections without a token from this address")))
        else:
            self._owed.set(self._limits.first_header_timeout_s)

    def _enter(self, transport: asyncio.Transport) -> bool:
        """Have the connection count for its address; return whether that may have one more."""
        visitors = self.config.visitors
        if visitors is None or VISITOR in self.app_state:
            return True
        visitor = visitors.enter(remote_address(transport))
        if visitor is None:
            return False
        self.app_state[VISITOR] = visitor
        return True

    def _whose(self) -> str:
        """Return whose the connection is to the event loop."""
        visitor: Visitor | None = self.app_state.get(VISITOR)
        if visitor is not None:
            return visitor.whose
        return ADMIN if self.config.visitors is None else ""

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._owed.clear()
        self._unread.clear()
        self._unset_keepalive_if_required()
        if self._lingers:
            self._lingers = False
            self.config.lingering -= 1
        leave(self.app_state)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the client said, unless it was refused."""
        if self._lingers or self.transport.is_closing():
            return
        whose.set(self._whose())  # which lasts: what is read next is called in the same context
        super().data_received(data)
        if self.transport.get_protocol() is not self:
            self._owed.clear()  # it is a WebSocket now
        elif not self._lingers:
            self._wait_for_more()

    def pause_writing(self) -> None:
        """Give the client some time to read."""
        super().pause_writing()
        self._unread.set(self._limits.read_timeout_s)

    def resume_writing(self) -> None:
        """Go on: it has read."""
        self._unread.clear()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, which h11 has just told."""
        problem = sys.exception()
        status = BAD_REQUEST
        if isinstance(problem, h11.RemoteProtocolError):
            status, msg = problem.error_status_hint, f"this is no HTTP/1.1: {problem}"
        self._refuse(plain(status, msg))

    def _wait_for_more(self) -> None:
        """Set the deadline for what the client owes us now; between two requests it is nothing."""
        if self.conn.their_state is h11.SEND_BODY:
            self._owed.set(self._limits.body_timeout_s)
        elif self.conn.their_state is not h11.IDLE or not self.conn.trailing_data[0]:
            self._owed.clear()
        elif not self._owed.is_set:
            self._owed.set(self._limits.header_timeout_s)

    def _too_late(self) -> None:
        in_body = self.conn.their_state is h11.SEND_BODY
        if in_body and (self.flow.read_paused or self.cycle.waiting_for_100_continue):
            self._owed.set(self._limits.body_timeout_s)  # it is we who do not go on
            return
        what = "body" if in_body else "header"
        self._refuse(plain(REQUEST_TIMEOUT, f"the {what} of the request did not come in time"))

    def _not_read(self) -> None:
        log.warning("client cut off that does not read", extra={"path": self.scope["path"]})
        self.transport.abort()

    def _refuse(self, answer: Response) -> None:
        """Answer if nothing was answered yet, leave the request alone, and close."""
        self._owed.clear()
        self._unset_keepalive_if_required()
        begun = False
        if self.cycle is not None and not self.cycle.response_complete:
            begun = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.connections.discard(self)
        if begun or self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.abort()
            return
        headers = [*answer.raw_headers, (b"connection", b"close")]
        with contextlib.suppress(h11.LocalProtocolError):  # the body of an answer to HEAD
            said = h11.Response(status_code=answer.status_code, headers=headers)
            self.transport.write(self.conn.send(said) or b"")
            self.transport.write(self.conn.send(h11.Data(data=bytes(answer.body))) or b"")
        self._linger()

    def _linger(self) -> None:
        """Close when the client has read what was sent, or has had the time to."""
        if self.config.lingering >= LINGERING_MAX:
            self.transport.close()
            return
        self.config.lingering += 1
        self._lingers = True
        self.flow.resume_reading()  # to see its end
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()  # of TLS: waits for the client's end by itself
        self._owed = Deadline(self.loop, self.transport.abort)
        self._owed.set(self._limits.linger_timeout_s)


class WebSocketConnection(WebSocketsSansIOProtocol):
    """A WebSocket whose client must read in time."""

    config: Gate

    def __init__(
        self,
        config: Gate,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._unread = Deadline(self.loop, self._not_read)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._unread.clear()
        leave(self.app_state)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give the client some time to read."""
        super().pause_writing()
        self._unread.set(self._limits.read_timeout_s)

    def resume_writing(self) -> None:
        """Go on: it has read."""
        self._unread.clear()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Take what the client said; refuse what is no request, which uvicorn passes over."""
        super().data_received(data)
        problem = self.conn.handshake_exc
        if problem is not None and not self.handshake_initiated:
            self._refuse(plain(BAD_REQUEST, f"no WebSocket handshake: {problem.__cause__}"))

    def handle_connect(self, event: Request) -> None:
        """Begin the WebSocket, or refuse a handshake that is none."""
        answer = self.conn.accept(event)
        if answer.status_code == 101:  # noqa: PLR2004 - it switches protocols
            super().handle_connect(event)
            return
        # One line, which is what websockets says first.
        said = (answer.body or b"").decode().partition("\n")[0]
        self._refuse(plain(answer.status_code, said))

    def handle_ping(self) -> None:
        """Answer, unless the client does not read anyway: answers would pile up."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def _refuse(self, answer: Response) -> None:
        self.handshake_complete = self.close_sent = True
        lines = [b"HTTP/1.1 %d " % answer.status_code]
        lines += [b"%s: %s" % each for each in (*answer.raw_headers, (b"connection", b"close"))]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()

    def _not_read(self) -> None:
        """Close with a reason, which the client finds behind what it has not read."""
        reason = f"nothing was read for {self._limits.read_timeout_s:g} s"
        log.warning("client cut off that does not read", extra={"path": self.scope["path"]})
        with contextlib.suppress(InvalidState):
            self.conn.send_close(NOT_READ, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
        self.queue.put_nowait({"type": "websocket.disconnect", "code": NOT_READ, "reason": reason})
        self.close_sent = self.disconnected = True
        self.writable.set()
        self.transport.close()
        self._unread = Deadline(self.loop, self.transport.abort)
        self._unread.set(self._limits.linger_timeout_s)


def _peer(transport: asyncio.Transport) -> dict[str, int]:
    """Return the process and the user at the other end of a Unix socket; nothing of TCP."""
    sock = transport.get_extra_info("socket")
    if not sockets.is_unix(sock):
        return {}
    try:
        pid, uid, _ = sockets.peer_credentials(sock)
    except ForkdError:  # it was lost already
        return {}
    return {PEER_PID: pid, PEER_UID: uid}


def remote_address(transport: asyncio.Transport) -> str:
    """Return the address at the other end of TCP; empty if it was lost already."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if peer else ""


def leave(app_state: Mapping[str, Any]) -> None:
    """Have a connection that is lost count for nobody any more."""
    visitor: Visitor | None = app_state.get(VISITOR)
    if visitor is not None:
        visitor.leave()


def too_much(what: str) -> CapacityError:
    """Return the error of a client that finds everything taken."""
    return CapacityError(f"too many {what} at once; try again", retry_after_s=RETRY_AFTER_S)
