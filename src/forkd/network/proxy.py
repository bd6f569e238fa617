"""The egress proxy: secrets of sandboxes are put into their requests here, on the host.

It listens on a port of its own.  The packet filter leads there what sandboxes with secrets send to
the ports that their secrets are for, once it has allowed it; who connects is told by the source
address, which the filter does not let them choose, and where to by the address that the connection
had.  What is for a host that a secret is for is answered with a certificate of the sandbox's own
CA, and passed on request by request; everything else is passed on as it is.

The proxy connects from the host, whose own packets no wall stops.  So it asks again whether the
sandbox may reach that address, and does not rely on what was led to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

import h11

from forkd.errors import ForkdError, HostError
from forkd.host import files, sockets
from forkd.limits import PROXY_CONNECTIONS_MAX, PROXY_CONNECTIONS_PER_SANDBOX_MAX
from forkd.model.network import Protocol
from forkd.model.shares import Shares
from forkd.network import hello
from forkd.network.heads import FORBIDDEN, Refusal
from forkd.network.ranges import permits
from forkd.network.relay import Relay, splice
from forkd.network.upstream import BUFFER_BYTES, CONNECT_S, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from forkd.host.sockets import Socket
    from forkd.model.caller import Tenant
    from forkd.model.network import NetworkPolicy
    from forkd.model.secret import Bound
    from forkd.network.authority import Leaf
    from forkd.network.upstream import Upstreams

HELLO_S = 10.0
"""How long a guest may take to say whom it wants to talk to."""

ACCEPT_RETRY_S = 0.1
"""How long after there were no descriptors the next connection is taken."""

CONTEXTS_MAX = 1_024
"""Most certificates that are kept to be shown again."""

_BACKLOG = 256

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Client:
    """A sandbox that connects.

    Attributes:
        tap: Its link.
        tenant: Whose it is.
        policy: What it may reach.
        held: Whether it may reach nothing at the moment.
        reaches: Tells whether it may reach an address at a port now.
        secrets: Returns those that it may use now.
        root: Whose CA signs what it is shown.
        leaf: Returns what its CA signs for a name; None if it has no secrets.
    """

    tap: str
    tenant: Tenant
    policy: NetworkPolicy
    held: bool
    reaches: Callable[[str, int], bool]
    secrets: Callable[[], Sequence[Bound]] = tuple
    root: str = ""
    leaf: Callable[[str], Leaf] | None = None


class Proxy:
    """Passes on connections of sandboxes.

    Args:
        find: Returns the sandbox that has an address; None if none has.
        upstreams: Makes connections to the world.
        spawn: Runs one connection, so that its crash costs that connection only.
    """

    def __init__(
        self,
        find: Callable[[str], Client | None],
        upstreams: Upstreams,
        spawn: Callable[[Coroutine[object, object, None]], object],
    ) -> None:
        self._find = find
        self._upstreams = upstreams
        self._spawn = spawn
        self._listeners: tuple[Socket, ...] = ()
        self._serving: asyncio.Task[object] | None = None
        self._places = Shares(PROXY_CONNECTIONS_MAX)
        self._running: dict[str, set[asyncio.Task[object]]] = {}
        self._contexts: OrderedDict[tuple[str, str], ssl.SSLContext] = OrderedDict()
        self.port = 0

    def listen(self) -> None:
        """Listen, from now on until `close`; `serve` takes what comes.

        Raises:
            HostError: The kernel gives no port.
        """
        self._listeners = sockets.bind_tcp_everywhere(_BACKLOG)
        self.port = self._listeners[0].getsockname()[1]

    def close(self) -> None:
        """Listen no more, and end every connection; idempotent."""
        listeners, self._listeners = self._listeners, ()
        if self._serving is not None:
            self._serving.cancel()  # it closes what it listens on
            self._serving = None
        else:
            _close(listeners)
        for tap in tuple(self._running):
            self.end(tap)

    async def serve(self) -> None:
        """Take connections until `close`."""
        listeners = self._listeners
        self._serving = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as group:
                for each in listeners:
                    group.create_task(self._accept(each), name="egress proxy")
        finally:
            _close(listeners)

    @property
    def connections(self) -> int:
        """How many connections are open, of all sandboxes."""
        return self._places.used

    def end(self, tap: str) -> None:
        """End every connection of a sandbox, whose policy does not allow them any more."""
        for task in tuple(self._running.get(tap, ())):
            task.cancel()

    async def _accept(self, listener: Socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("connection of a sandbox not taken", extra={"error": str(error)})
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            sock.settimeout(0)
            self._spawn(self._converse(sock, peer[0]))

    async def _converse(self, sock: Socket, source: str) -> None:
        """Pass on one connection."""
        client = self._find(source)
        destination = sockets.original_destination(sock)
        task = asyncio.current_task()
        if client is None or destination is None or task is None:
            sockets.reset(sock)
            return
        if client.held or not client.reaches(*destination):
            about = {"tap": client.tap, "address": destination[0], "port": destination[1]}
            log.info("connection of a sandbox not allowed", extra=about)
            sockets.reset(sock)
            return
        running = self._running.setdefault(client.tap, set())
        is_full = len(running) >= PROXY_CONNECTIONS_PER_SANDBOX_MAX
        if is_full or not self._places.take(client.tenant):
            log.info("sandbox has too many connections", extra={"tap": client.tap})
            sockets.reset(sock)
            return
        running.add(task)
        try:
            await self._pass_on(sock, client, *destination)
        except* (OSError, EOFError, h11.ProtocolError, ForkdError) as group:
            kinds = sorted({type(each).__name__ for each in group.exceptions})
            about = {"tap": client.tap, "address": destination[0], "error": " ".join(kinds)}
            log.debug("connection of a sandbox ended", extra=about)
        finally:
            self._places.give_back(client.tenant)
            running.discard(task)
            if not running and self._running.get(client.tap) is running:
                del self._running[client.tap]
            sockets.reset(sock)  # what was orderly ended is closed already

    async def _pass_on(self, sock: Socket, client: Client, address: str, port: int) -> None:
        sockets.pass_on_at_once(sock)
        name = await _name(sock)
        if name is None or not _meant(client.secrets(), name, port):
            await self._splice(sock, name, address, port)
            return
        refused = None
        if not _may_reach(client.policy, name, address, port):
            reason = f"the policy of this sandbox does not allow {name}:{port}"
            refused = Refusal(FORBIDDEN, reason)

        async def dial() -> Stream:
            stream = await self._upstreams.connect(address, port, name)
            try:
                await self._upstreams.secure(stream, name)
            except BaseException:
                stream.abort()
                raise
            return stream

        guest = await _accepted(sock, self._context(client, name))
        try:
            secrets = client.secrets
            relay = Relay(
                guest, name, port, dial, lambda: _meant(secrets(), name, port), refused=refused
            )
            await relay.run()
            await guest.finish()
        finally:
            guest.abort()

    async def _splice(self, sock: Socket, name: str | None, address: str, port: int) -> None:
        try:
            upstream = await self._upstreams.connect(address, port, name)
        except HostError as error:
            log.info("upstream failed", extra={"address": address, "error": str(error)})
            return
        guest = await _accepted(sock, None)
        try:
            await splice(guest, upstream)
            await upstream.finish()
            await guest.finish()
        finally:
            guest.abort()
            upstream.abort()

    def _context(self, client: Client, name: str) -> ssl.SSLContext:
        """Return what a sandbox is shown as `name`."""
        key = client.root, name
        found = self._contexts.pop(key, None)
        if found is None:
            assert client.leaf is not None  # noqa: S101 - it has secrets, and so a CA
            leaf = client.leaf(name)
            found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            found.minimum_version = ssl.TLSVersion.TLSv1_2
            found.set_alpn_protocols(["http/1.1"])
            with files.in_memory(leaf.certificate + leaf.key) as path:
                found.load_cert_chain(path)
        self._contexts[key] = found
        if len(self._contexts) > CONTEXTS_MAX:
            self._contexts.popitem(last=False)
        return found


def _close(listeners: Sequence[Socket]) -> None:
    for each in listeners:
        each.close()


async def _name(sock: Socket) -> str | None:
    """Return whom a guest wants to talk to; None if it does not say so in time."""
    seen = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HELLO_S):
            while True:
                more = await sockets.peek(sock, len(seen) + 1, hello.HELLO_BYTES_MAX)
                name = hello.server_name(more)
                if name is not hello.UNFINISHED or len(more) <= len(seen):
                    return None if isinstance(name, hello.Unfinished) else name
                seen = more
    return None


def _meant(secrets: Sequence[Bound], name: str, port: int) -> list[Bound]:
    return [each for each in secrets if each.secret.is_for(name, port)]


def _may_reach(policy: NetworkPolicy, name: str, address: str, port: int) -> bool:
    """Whether a policy allows a name, whose address the packet filter has allowed for whatever."""
    if permits(policy, ip_address(address), Protocol.TCP, port):
        return True
    return any(
        not rule.ports or any(port == each.first for each in rule.ports)
        for rule in policy.named(name)
    )


async def _accepted(sock: Socket, context: ssl.SSLContext | None) -> Stream:
    """Return a guest's connection, with TLS if a context is given."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=BUFFER_BYTES, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    handshake_s = None if context is None else CONNECT_S
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, sock, ssl=context, ssl_handshake_timeout=handshake_s
    )
    return Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
