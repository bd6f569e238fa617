"""What guests reach by the egress proxy: no more than without it, whatever leads there.

The proxy connects from the host, where no wall stands; so the packet filter decides before it leads
a connection there, and the proxy decides again.  Either alone is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from forkd.host import netlink
from forkd.network import proxy as proxy_
from forkd.network import relay as relay_
from forkd.network import rules as rules_
from forkd.network.walls import Walls
from tests.support import outside as world
from tests.support.outside import FAMILIES, LINK, PORTS, REACHED, outside, serving
from tests.support.proxied import Proxied, scenario
from tests.support.service_host import until

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.support.outside import Outside

pytestmark = pytest.mark.needs("root", "nft")

LOOPBACK = "127.0.0.1"
SILENT_S = 1.0
PORT = 9_000
LED = tuple(f"x.example.com:{port}" for port in PORTS)

_DECIDES = """
    fib daddr type {{ local, broadcast, anycast, multicast }} goto refuse
    ip daddr {pool4} goto refuse
    ip6 daddr {{ {pool6}, {mapped} }} goto refuse"""
"""What of the table refuses the host and other sandboxes, whatever the policy."""


@pytest.fixture(scope="module")
def outer() -> Iterator[Outside]:
    with outside(2) as made:
        # So that the guest sends what is for this address to the host, and takes its answer.
        made.guests[0].run(lambda: netlink.clear_addresses("lo"))
        made.guests[0].sysctl("ipv4/conf/eth0/route_localnet", "1")
        made.guests[0].route(f"{LOOPBACK}/32", LINK[0])
        with serving(made.host, [(LOOPBACK, 443)]):
            yield made


@pytest.mark.parametrize("decides", ["both", "the packet filter", "the proxy"])
def test_every_port_led_to_the_proxy_reaches_no_more_than_without_it(
    outer: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decides: str
) -> None:
    if decides == "the packet filter":
        monkeypatch.setattr(Walls, "permits", lambda *_: True)
    if decides == "the proxy":
        assert _DECIDES in rules_._TABLE  # noqa: SLF001 - a table of which a part is missing
        monkeypatch.setattr(rules_, "_TABLE", rules_._TABLE.replace(_DECIDES, ""))  # noqa: SLF001

    async def work(proxied: Proxied) -> None:
        proxied.set(hosts=LED)
        for rules in REACHED:
            await proxied.put(*rules)
            for name, family in FAMILIES.items():
                found = await asyncio.to_thread(outer.try_all, "tcp", family)
                assert found == world.expected(rules, "tcp", name), (rules, name)
        await proxied.put("127.0.0.0/8")
        monkeypatch.setattr(world, "DEADLINE_S", SILENT_S)
        # The kernel sends no reset in the name of such an address, but the proxy does.
        assert await proxied.try_("tcp", LOOPBACK, 443) in {"refused", "silence"}

    scenario(outer, tmp_path, work)


def test_a_tenant_has_at_most_half_of_all_connections(
    outer: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_, "PROXY_CONNECTIONS_MAX", 2)

    async def work(proxied: Proxied) -> None:
        async with talking(proxied):
            assert proxied.egress.proxy.connections == 1
            assert await proxied.try_("tcp", world.PUBLIC[0], 443) == "refused"
        await until(lambda: proxied.egress.proxy.connections == 0)
        assert await proxied.try_("tcp", world.PUBLIC[0], 443) == "reached"

    scenario(outer, tmp_path, work)


def test_a_connection_that_is_passed_on_as_it_is_ends_when_both_are_silent(
    outer: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_, "SPLICE_IDLE_S", 0.5)

    async def work(proxied: Proxied) -> None:
        async with talking(proxied) as client:
            with pytest.raises(ConnectionResetError):
                await proxied.in_guest(lambda: client.recv(1))

    scenario(outer, tmp_path, work)


@contextlib.asynccontextmanager
async def talking(proxied: Proxied) -> AsyncIterator[socket.socket]:
    """Yield a guest's connection by the proxy, over which it has said something that is no TLS."""
    proxied.set(hosts=(*LED, f"x.example.com:{PORT}"))
    await proxied.put("internet")
    address, hello = world.PUBLIC[0], b"SSH-2.0-nothing\r\n"
    with proxied.outer.world.run(lambda: world.listening(address, PORT)) as server:
        client = await proxied.in_guest(lambda: world.connected(address, PORT))
        with client:
            client.sendall(hello)
            accepted, _ = await asyncio.to_thread(server.accept)
            with accepted:
                accepted.settimeout(world.DEADLINE_S)
                assert await asyncio.to_thread(accepted.recv, 64) == hello
                yield client
