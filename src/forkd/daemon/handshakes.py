"""How connections begin where TLS is spoken.

The first byte says what a client speaks.  One that speaks plain HTTP is told so, in plain HTTP,
instead of being cut off.  A handshake has a deadline and counts among the connections, of which
there are only so many: uvicorn learns of a connection when its handshake is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from typing import TYPE_CHECKING, Any, cast

from forkd.daemon.auditing import host_and_port
from forkd.daemon.connections import BAD_REQUEST, Gate, HttpConnection, remote_address
from forkd.daemon.errors import plain
from forkd.daemon.peers import VISITOR
from forkd.errors import Denied, ForkdError
from forkd.host import sockets

if TYPE_CHECKING:
    from uvicorn.server import ServerState

    from forkd.daemon.auditing import Auditor
    from forkd.daemon.clients import ClientLimits
    from forkd.daemon.tls import Certificates
    from forkd.daemon.visitors import Visitor

HANDSHAKE = b"\x16"
"""First byte of a TLS connection: a record of a handshake."""

NOT_TLS = "this address speaks TLS: its URL begins with https://"

TURNED_AWAY = "tls_handshake"
"""Action of a client without a certificate that it needs."""

log = logging.getLogger(__name__)


class TlsGate(Gate):
    """The configuration of the server of an address where TLS is spoken.

    Args:
        limits: What clients may take.
        certificates: Those that new connections are greeted with.
        auditor: Writes down who had to show a certificate, and could not.
        options: Of uvicorn.
    """

    def __init__(
        self,
        limits: ClientLimits,
        certificates: Certificates,
        auditor: Auditor,
        **options: Any,  # noqa: ANN401 - uvicorn's
    ) -> None:
        super().__init__(limits, **options)
        self.http = Greeting
        self.certificates = certificates
        self.auditor = auditor
        self.greetings: set[asyncio.Task[None]] = set()

    def end_greetings(self) -> None:
        """Leave clients alone that are still in their handshake."""
        for each in self.greetings:
            each.cancel()


class _Shaking:
    """The context of one handshake, which knows what it would have said last.

    asyncio throws away what OpenSSL has to say to a client whose handshake has failed: why.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self.unsent = b""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        **options: Any,  # noqa: ANN401 - of the context's own
    ) -> ssl.SSLObject:
        """Do as the context does, which is all that asyncio asks of it."""
        made = self._context.wrap_bio(incoming, outgoing, **options)
        shake = made.do_handshake

        def do_handshake() -> None:
            try:
                shake()
            except ssl.SSLWantReadError:
                raise
            except ssl.SSLError:
                self.unsent = outgoing.read()
                raise

        made.do_handshake = do_handshake  # type: ignore[method-assign]  # asyncio calls it
        return made


class Greeting(asyncio.Protocol):
    """A connection until it is known what it speaks, and its handshake is over.

    The arguments are those of uvicorn's protocols.
    """

    def __init__(
        self,
        config: TlsGate,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._gate = config
        self._state = server_state
        self._app_state = app_state
        self._loop = _loop or asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the socket over: what a transport has read cannot be read again."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a stream
        transport.pause_reading()
        gate = self._gate
        taken: sockets.Socket | None = None
        visitor: Visitor | None = None
        if gate.has_room(len(gate.greetings) + 1, transport) and gate.visitors is not None:
            visitor = gate.visitors.enter(remote_address(transport))
        if visitor is not None:
            with contextlib.suppress(OSError):
                taken = transport.get_extra_info("socket").dup()
        transport.abort()
        if visitor is None or taken is None:
            log.warning("connection refused", extra={"handshakes": len(gate.greetings)})
            if visitor is not None:
                visitor.leave()
            return
        task = self._loop.create_task(self._greet(taken, visitor))
        gate.greetings.add(task)
        task.add_done_callback(gate.greetings.discard)

    async def _greet(self, sock: sockets.Socket, visitor: Visitor) -> None:
        limits = self._gate.limits
        with contextlib.ExitStack() as stack:
            stack.callback(visitor.leave)
            stack.callback(sock.close)
            try:
                async with asyncio.timeout(limits.first_header_timeout_s):
                    first = await self._first_byte(sock)
                if first == HANDSHAKE:
                    stack.pop_all()  # its transport closes it, and its protocol leaves
                    await self._shake_hands(sock, visitor)
                elif first:
                    async with asyncio.timeout(limits.linger_timeout_s):
                        await self._refuse(sock)
            except (OSError, ForkdError) as error:  # that time is over is one
                log.info("client left before its first request", extra={"error": str(error)})

    async def _first_byte(self, sock: sockets.Socket) -> bytes:
        """Return the first byte, which stays to be read; empty if there is none."""
        sock.setblocking(False)  # noqa: FBT003 - the library's own
        readable = self._loop.create_future()

        def note() -> None:
            self._loop.remove_reader(sock)
            if not readable.done():
                readable.set_result(None)

        self._loop.add_reader(sock, note)
        try:
            await readable
        finally:
            self._loop.remove_reader(sock)
        return sockets.first_byte(sock)

    async def _shake_hands(self, sock: sockets.Socket, visitor: Visitor) -> None:
        gate, limits = self._gate, self._gate.limits
        remote = host_and_port(*sock.getpeername()[:2])
        shaking = _Shaking(gate.certificates.context)
        state = {**self._app_state, VISITOR: visitor}
        with contextlib.ExitStack() as stack, sock.dup() as ours:  # the transport closes its own
            stack.callback(visitor.leave)
            try:
                await self._loop.connect_accepted_socket(
                    lambda: HttpConnection(gate, self._state, state, self._loop),
                    sock,
                    ssl=cast("ssl.SSLContext", shaking),
                    ssl_handshake_timeout=limits.first_header_timeout_s,
                    ssl_shutdown_timeout=limits.linger_timeout_s,
                )
                stack.pop_all()
            except ssl.SSLError as error:
                reason = error.reason or str(error)
                log.info("TLS handshake failed", extra={"remote": remote, "reason": reason})
                if gate.certificates.asks_clients and "CERTIFICATE" in reason:
                    gate.auditor.denied(TURNED_AWAY, remote, Denied.code)
                async with asyncio.timeout(limits.linger_timeout_s):
                    await self._say_last(ours, shaking.unsent)

    async def _refuse(self, sock: sockets.Socket) -> None:
        """Answer a client that speaks no TLS, and close once it has read that."""
        answer = plain(BAD_REQUEST, NOT_TLS)
        lines = [b"HTTP/1.1 %d Bad Request" % answer.status_code]
        lines += [b"%s: %s" % each for each in (*answer.raw_headers, (b"connection", b"close"))]
        await self._say_last(sock, b"\r\n".join([*lines, b"", bytes(answer.body)]))

    async def _say_last(self, sock: sockets.Socket, data: bytes) -> None:
        """Send something, and wait until the client has read it."""
        await self._loop.sock_sendall(sock, data)
        sockets.end_writing(sock)
        while await self._loop.sock_recv(sock, 65_536):
            pass
