"""A guest behind the egress proxy, as the daemon runs it: a host between it and real servers.

guest 0 ── host (walls, resolver, proxy) ── world: a recorder at `ADDRESS`, names, others
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from forkd.model.caller import Tenant
from forkd.model.network import parse_policy
from forkd.model.secret import Bound, Secret, SecretUse, SecretValue, parse_hosts
from forkd.network.rules import Wall
from forkd.network.upstream import Upstreams
from forkd.service.egress import Egress
from forkd.service.supervision import Supervisor
from forkd.service.vault import Vault
from tests.support import certificates
from tests.support import outside as world
from tests.support.name_server import PORT as DNS_PORT
from tests.support.outside import PLAN, Outside

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from forkd.network.upstream import Via

T = TypeVar("T")

ADDRESS, ADDRESS_V6 = "203.0.113.77", "2001:db8:1::77"
"""Where the server is that secrets are for."""

HOST = "api.example.com"
OTHER_HOST = "other.example.com"
TENANT = Tenant("ours")
VALUE = "sk-Th1sIsTheValue/+=of~a(secret)"
PLACEHOLDER = "forkd-secret-token"


@dataclass(frozen=True)
class Answer:
    """What a guest was answered."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def everything(self) -> str:
        return repr(self)


@dataclass
class Proxied:
    """What a test asks with."""

    outer: Outside
    egress: Egress
    vault: Vault
    secrets: dict[str, str] = field(default_factory=dict)

    def set(
        self,
        name: str = "token",
        value: str = VALUE,
        hosts: tuple[str, ...] = (HOST,),
        *,
        header: str = "Authorization",
        tenant: Tenant = TENANT,
    ) -> None:
        secret = Secret(name, tenant, parse_hosts(hosts), header, None, datetime.now(UTC))
        self.vault.put(Bound(secret, SecretValue(value)))

    async def put(
        self,
        *rules: str,
        secrets: tuple[str, ...] = ("token",),
        held: bool = False,
        tenant: Tenant = TENANT,
    ) -> Wall:
        policy = parse_policy(list(rules or (f"{ADDRESS}",)))
        assert policy is not None
        use = SecretUse(tenant, "sb-0", secrets) if secrets else None
        wall = Wall("sb-0", PLAN.slot(0), policy, held, use=use)
        await self.egress.put([wall])
        return wall

    def trust(self) -> ssl.SSLContext:
        """Return what a guest trusts that was told of its CA and knows no other."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=self.vault.authority("sb-0").certificate().decode())
        return context

    def connection(
        self,
        host: str = HOST,
        *,
        port: int = 443,
        context: ssl.SSLContext | None = None,
        address: str = ADDRESS,
    ) -> http.client.HTTPSConnection:
        """Return a connection for the guest, which is made when it is asked over."""
        made = http.client.HTTPSConnection(
            host, port, timeout=world.DEADLINE_S, context=context or self.trust()
        )
        # Whatever the name resolves to, as a guest would that has it in /etc/hosts.
        made._create_connection = lambda *_, **__: socket.create_connection(  # type: ignore[attr-defined]  # noqa: SLF001
            (address, port), world.DEADLINE_S
        )
        return made

    async def ask(  # noqa: PLR0913 - what a request consists of
        self,
        path: str = "/",
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "GET",
        body: bytes | None = None,
        host: str = HOST,
        over: http.client.HTTPSConnection | None = None,
        context: ssl.SSLContext | None = None,
    ) -> Answer:
        """Have the guest ask something, over a new connection unless one is given."""
        given = {"Authorization": f"Bearer {PLACEHOLDER}"} if headers is None else headers
        connection = over or self.connection(host, context=context)

        def ask() -> Answer:
            connection.request(method, path, body, dict(given))
            found = connection.getresponse()
            answer = Answer(found.status, tuple(found.getheaders()), found.read())
            if over is None:
                connection.close()
            return answer

        return await self.in_guest(ask)

    async def talk(self, data: bytes, *, context: ssl.SSLContext | None = None) -> bytes:
        """Have the guest send bytes over TLS, and return all that it is answered."""

        def talk() -> bytes:
            with (
                socket.create_connection((ADDRESS, 443), world.DEADLINE_S) as sock,
                (context or self.trust()).wrap_socket(sock, server_hostname=HOST) as secured,
            ):
                secured.sendall(data)
                return _all(secured)

        return await self.in_guest(talk)

    async def try_(self, protocol: str, address: str, port: int) -> str:
        return await self.in_guest(lambda: world.attempt(protocol, address, port))

    async def in_guest(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(self.outer.guests[0].run, work)


def _all(sock: ssl.SSLSocket) -> bytes:
    found = b""
    try:
        while data := sock.recv(65_536):
            found += data
    except (ConnectionError, ssl.SSLError):
        pass
    return found


def servers_certificate(
    folder: Path, names: tuple[str, ...] = (HOST, OTHER_HOST)
) -> tuple[Path, tuple[Path, Path]]:
    """Return a file with a CA, and a certificate that it signed, with its key."""
    root = certificates.root()
    ca, _ = root.write(folder, "root")
    return ca, root.sign("server", names=names).write(folder, "server")


def scenario(
    outer: Outside,
    folder: Path,
    work: Callable[[Proxied], Awaitable[None]],
    *,
    ca_file: Path | None = None,
    via: Via | None = None,
) -> None:
    """Do `work` on the host, with a proxy."""

    async def run() -> None:
        vault = Vault(folder)
        vault.unlock(make=True)
        async with Supervisor() as tasks:
            upstreams = Upstreams(via, ca_file)
            dns = [(world.NAME_SERVER, DNS_PORT)]
            egress = Egress(PLAN, tasks, dns, vault, upstreams)
            proxied = Proxied(outer, egress, vault)
            try:
                await work(proxied)
            finally:
                await egress.take([(await proxied.put("deny-all")).slot.tap])
                egress.close()

    outer.host.run(lambda: asyncio.run(run()))


def trusting(ca: Path) -> ssl.SSLContext:
    """Return what trusts a CA of a file, and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    return context
