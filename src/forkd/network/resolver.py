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
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, cast

import dns.message

from forkd.errors import ForkdError
from forkd.host import sockets
from forkd.limits import RESOLVER_QUESTIONS_BURST_MAX, RESOLVER_QUESTIONS_PER_S_MAX
from forkd.network import names
from forkd.network.questions import Questions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from forkd.network.names import Asker, Resolved
    from forkd.network.questions import Upstream
    from forkd.network.rules import Opening

TCP_IDLE_S = 10.0
"""How long a connection may be silent."""

TCP_PER_SANDBOX_MAX = 8
"""Most connections of one sandbox; another is closed at once."""

QUESTION_BYTES_MAX = 4_096
"""Longest question; a longer one is not answered."""

BUCKETS_MAX = 4_096
"""Sandboxes whose questions are counted before those that asked nothing lately are forgotten."""

RESOLV_CONF = Path("/etc/resolv.conf")
"""Names the name servers of this host."""

RESOLV_CONF_BYTES_MAX = 64 << 10

_QUESTION_S = 1 / RESOLVER_QUESTIONS_PER_S_MAX
_BUCKET_S = RESOLVER_QUESTIONS_BURST_MAX / RESOLVER_QUESTIONS_PER_S_MAX
_PORT = 53
_LENGTH = struct.Struct("!H")

log = logging.getLogger(__name__)


class Resolver:
    """Answers sandboxes.

    Args:
        find: Returns the sandbox that has an address; None if none has.
        open_for: Opens addresses for a sandbox, before it is told of them: which, for how many
            seconds, and by the mark of which wall.
        upstreams: Returns whom to ask, in turn.
        spawn: Runs the answer to one question, so that its crash costs that question only.
        clock: Tells monotonic time, in seconds.
    """

    def __init__(
        self,
        find: Callable[[str], Asker | None],
        open_for: Callable[[Sequence[Opening], int, int], Awaitable[None]],
        upstreams: Callable[[], Sequence[Upstream]],
        spawn: Callable[[Coroutine[object, object, None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._open_for = open_for
        self._questions = Questions(upstreams, clock)
        self._spawn = spawn
        self._clock = clock
        self._buckets = Buckets(clock)
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
        ended: asyncio.Future[BaseException | None] = loop.create_future()
        self._ended = ended
        self._packets, self._servers = [], []
        for listener, packets in sockets.bind_tcp_and_udp(ipv6=ipv6):
            self.port = listener.getsockname()[1]
            made = loop.create_datagram_endpoint(lambda: _Packets(self, ended), sock=packets)
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
        """Return when what was started last is closed.

        Raises:
            OSError: It ended by itself.
        """
        if self._ended is not None and (error := await asyncio.shield(self._ended)) is not None:
            raise error

    def receive(self, wire: bytes, source: str, reply: Callable[[bytes], None]) -> None:
        """Have a question over UDP answered, if a sandbox asks, and not too often."""
        asker = self._find(source)
        if asker is None or len(wire) > QUESTION_BYTES_MAX or not self._buckets.take(asker.tap):
            return

        async def work() -> None:
            query = names.parse(wire)
            answer = None if query is None else await self.answer(query, source)
            if answer is not None:
                reply(names.to_wire(answer, query))

        self._spawn(work())

    async def answer(
        self, query: dns.message.QueryMessage, source: str
    ) -> dns.message.Message | None:
        """Return the answer to one question; None if the sandbox that asked is there no more.

        Args:
            query: The question.
            source: The address of the sandbox.
        """
        asker = self._find(source)
        if asker is None:
            return None
        if (refused := _refused(query, asker)) is not None:
            return refused
        known: Resolved | dns.message.Message | None
        if names.is_for_addresses(query):
            known = await self._questions.resolve(query, asker)
        else:
            known = await self._questions.ask(query, asker)
        now = self._find(source)
        if now is None or now.lease != asker.lease:
            return None
        if (refused := _refused(query, now)) is not None:  # its policy may be another since
            return refused
        return await self._tell(query, known, now)

    async def _tell(
        self,
        query: dns.message.QueryMessage,
        known: Resolved | dns.message.Message | None,
        asker: Asker,
    ) -> dns.message.Message:
        """Open what a sandbox is about to be told, and return the answer."""
        if known is None:
            return names.fail(query)
        if isinstance(known, dns.message.Message):
            return names.pass_on(query, known)
        answered = names.answer(query, known, asker, self._clock())
        if answered.why is not None:
            asker.refused.note(names.name_of(query), answered.why)
        if answered.openings:
            try:
                await self._open_for(answered.openings, answered.seconds, asker.mark)
            except ForkdError as error:
                about = {"name": names.name_of(query), "tap": asker.tap, "error": str(error)}
                log.warning("name not opened", extra=about)
                return names.fail(query)
        return answered.message

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
                await asyncio.sleep(self._buckets.owe(asker.tap))
                answer = await self.answer(query, source)
                if answer is None:
                    return
                wire = names.to_wire(answer, None)
                async with asyncio.timeout(TCP_IDLE_S):
                    writer.write(_LENGTH.pack(len(wire)) + wire)
                    await writer.drain()


def _refused(query: dns.message.QueryMessage, asker: Asker) -> dns.message.Message | None:
    """Return the answer to a question that need not be asked upstream; None for any other."""
    why = names.refusal(query, asker)
    if why is not None:
        asker.refused.note(names.name_of(query), why)
        return names.refuse(query, why)
    if not names.is_for_addresses(query) and not names.passes(query, asker):
        return dns.message.make_response(query, recursion_available=True)  # none of that kind
    return None


class _Packets(asyncio.DatagramProtocol):
    """What comes over UDP.

    Args:
        resolver: Answers it.
        ended: Is told when nothing comes any more, by the socket that this start has made.
    """

    def __init__(self, resolver: Resolver, ended: asyncio.Future[BaseException | None]) -> None:
        self._resolver = resolver
        self._ended = ended
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        def reply(wire: bytes) -> None:
            if self._transport is not None and not self._transport.is_closing():
                self._transport.sendto(wire, addr)

        self._resolver.receive(data, addr[0], reply)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(exc or OSError("the resolver's socket was closed"))


class Buckets:
    """How often sandboxes may ask: so many questions at once, refilled with time.

    Args:
        clock: Tells monotonic time, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._full_s: dict[str, float] = {}
        """When the bucket of a link is full again."""

    def take(self, tap: str) -> bool:
        """Take a question from a link's bucket; return whether there was one."""
        if self._next(tap) > self._clock() + _BUCKET_S + _QUESTION_S / 2:
            return False
        self.owe(tap)
        return True

    def owe(self, tap: str) -> float:
        """Take a question, and return how long after now the bucket has it."""
        now = self._clock()
        if len(self._full_s) >= BUCKETS_MAX:
            self._full_s = {each: when for each, when in self._full_s.items() if when > now}
        self._full_s[tap] = self._next(tap)
        return max(0.0, self._full_s[tap] - now - _BUCKET_S)

    def _next(self, tap: str) -> float:
        """Return when a link's bucket would be full again if a question was taken now."""
        now = self._clock()
        return max(self._full_s.get(tap, now), now) + _QUESTION_S


def upstreams_of(resolv_conf: str) -> tuple[Upstream, ...]:
    """Return the servers that a resolv.conf(5) names, in its order."""
    found = []
    for line in resolv_conf.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            found.append((words[1].partition("%")[0], _PORT))
    return tuple(found)
