"""Our own DNS, for sandboxes: what they may ask for is asked upstream, all else is refused.

It listens on one port of its own for UDP and TCP; the packet filter leads there what sandboxes
send to port 53 of the host's end of their links, and nothing else.  Who asks is told by the source
address, which the filter does not let them choose.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import dns.asyncquery
import dns.message
from dns.exception import DNSException

from forkd.errors import ForkdError
from forkd.host import sockets
from forkd.limits import RESOLVER_QUESTIONS_MAX, RESOLVER_QUESTIONS_PER_SANDBOX_MAX
from forkd.network import names

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from forkd.network.names import Asker
    from forkd.network.rules import Opening

UPSTREAM_S = 5.0
"""How long one server upstream may take to answer before the next is asked."""

TCP_IDLE_S = 10.0
"""How long a connection may be silent."""

TCP_PER_SANDBOX_MAX = 8
"""Most connections of one sandbox; another is closed at once."""

QUESTION_BYTES_MAX = 4_096
"""Longest question; a longer one is not answered."""

RESOLV_CONF = Path("/etc/resolv.conf")
"""Names the name servers of this host."""

RESOLV_CONF_BYTES_MAX = 64 << 10

_PORT = 53
_LENGTH = struct.Struct("!H")

Upstream: TypeAlias = tuple[str, int]
"""Address and port of a server that is asked."""

log = logging.getLogger(__name__)


class Resolver:
    """Answers sandboxes.

    Args:
        find: Returns the sandbox that has an address; None if none has.
        open_for: Opens addresses for a sandbox, before it is told of them.
        upstreams: Returns whom to ask, in turn.
        spawn: Runs the answer to one question, so that its crash costs that question only.
    """

    def __init__(
        self,
        find: Callable[[str], Asker | None],
        open_for: Callable[[Sequence[Opening], int], Awaitable[None]],
        upstreams: Callable[[], Sequence[Upstream]],
        spawn: Callable[[Coroutine[object, object, None]], object],
    ) -> None:
        self._find = find
        self._open_for = open_for
        self._upstreams = upstreams
        self._spawn = spawn
        self._asking: Counter[str] = Counter()
        self._connections: Counter[str] = Counter()
        self._ended: asyncio.Future[BaseException | None] | None = None
        self._packets: list[asyncio.DatagramTransport] = []
        self._servers: list[asyncio.Server] = []
        self.port = 0

    async def start(self, *, ipv6: bool) -> None:
        """Listen, from now on until `close`.

        Args:
            ipv6: Whether for questions over IPv6, too.

        Raises:
            HostError: The kernel gives no port.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._packets, self._servers = [], []
        for listener, packets in sockets.bind_tcp_and_udp(ipv6=ipv6):
            self.port = listener.getsockname()[1]
            made = loop.create_datagram_endpoint(lambda: _Packets(self), sock=packets)
            self._packets.append((await made)[0])
            self._servers.append(await asyncio.start_server(self._converse, sock=listener))

    def close(self) -> None:
        """Listen no more; idempotent."""
        if self._ended is None:
            return
        if not self._ended.done():
            self._ended.set_result(None)
        for transport in self._packets:
            transport.close()
        for server in self._servers:
            server.close()

    async def until_ended(self) -> None:
        """Return when it was closed.

        Raises:
            OSError: It ended by itself.
        """
        if self._ended is not None and (error := await asyncio.shield(self._ended)) is not None:
            raise error

    def note_end(self, error: BaseException | None) -> None:
        """Note that packets come no more."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error or OSError("the resolver's socket was closed"))

    def receive(self, wire: bytes, source: tuple[str, int], reply: Callable[[bytes], None]) -> None:
        """Have a question over UDP answered, if a sandbox asks."""
        asker = self._find(source[0])
        if asker is None or len(wire) > QUESTION_BYTES_MAX:
            return

        async def work() -> None:
            query = names.parse(wire)
            if query is not None:
                reply(names.to_wire(await self.answer(query, asker), query))

        self._spawn(work())

    async def answer(self, query: dns.message.QueryMessage, asker: Asker) -> dns.message.Message:
        """Return the answer to one question."""
        why = names.refusal(query, asker)
        if why is not None:
            asker.refused.note(names.name_of(query), why)
            return names.refuse(query, why)
        for_addresses = names.is_for_addresses(query)
        if not for_addresses and not names.passes(query, asker):
            return dns.message.make_response(query, recursion_available=True)  # none of that kind
        upstream = await self._ask_in_turn(query, asker)
        if upstream is None:
            return names.fail(query)
        if not for_addresses:
            upstream.id = query.id
            return upstream
        answered = names.answer(query, upstream, asker)
        if answered.why is not None:
            asker.refused.note(names.name_of(query), answered.why)
        if answered.openings:
            try:
                await self._open_for(answered.openings, answered.seconds)
            except ForkdError as error:
                about = {"name": names.name_of(query), "tap": asker.tap, "error": str(error)}
                log.warning("name not opened", extra=about)
                return names.fail(query)
        return answered.message

    async def _ask_in_turn(
        self, query: dns.message.QueryMessage, asker: Asker
    ) -> dns.message.Message | None:
        """Ask upstream, if there is room; return None if nobody answers."""
        if (
            self._asking[asker.tap] >= RESOLVER_QUESTIONS_PER_SANDBOX_MAX
            or self._asking.total() >= RESOLVER_QUESTIONS_MAX
        ):
            return None
        self._asking[asker.tap] += 1
        try:
            return await self._ask(query)
        finally:
            self._asking[asker.tap] -= 1
            self._asking += Counter()  # forget who does not ask

    async def _ask(self, query: dns.message.QueryMessage) -> dns.message.Message | None:
        question = query.question[0]
        asked = dns.message.make_query(question.name, question.rdtype, use_edns=0)
        for address, port in self._upstreams():
            try:
                answered, _ = await dns.asyncquery.udp_with_fallback(
                    asked, address, timeout=UPSTREAM_S, port=port
                )
            except (DNSException, OSError, EOFError) as error:
                about = {"server": address, "error": str(error) or type(error).__name__}
                log.info("name server did not answer", extra=about)
            else:
                return answered
        return None

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer what comes over one connection."""
        source = writer.get_extra_info("peername")[0]
        asker = self._find(source)
        try:
            if asker is None or self._connections[source] >= TCP_PER_SANDBOX_MAX:
                return
            self._connections[source] += 1
            try:
                await self._answer_all(reader, writer, source)
            finally:
                self._connections[source] -= 1
                self._connections += Counter()
        finally:
            writer.close()

    async def _answer_all(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str
    ) -> None:
        with contextlib.suppress(TimeoutError, OSError, EOFError):
            while True:
                async with asyncio.timeout(TCP_IDLE_S):
                    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                    if length > QUESTION_BYTES_MAX:
                        return
                    query = names.parse(await reader.readexactly(length))
                asker = self._find(source)
                if query is None or asker is None:
                    return
                wire = names.to_wire(await self.answer(query, asker), None)
                async with asyncio.timeout(TCP_IDLE_S):
                    writer.write(_LENGTH.pack(len(wire)) + wire)
                    await writer.drain()


class _Packets(asyncio.DatagramProtocol):
    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        def reply(wire: bytes) -> None:
            if self._transport is not None and not self._transport.is_closing():
                self._transport.sendto(wire, addr)

        self._resolver.receive(data, addr, reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._resolver.note_end(exc)


def upstreams_of(resolv_conf: str) -> tuple[Upstream, ...]:
    """Return the servers that a resolv.conf(5) names, in its order."""
    found = []
    for line in resolv_conf.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            found.append((words[1].partition("%")[0], _PORT))
    return tuple(found)
