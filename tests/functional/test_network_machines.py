"""What a real guest reaches, and how that changes: by a policy, a held branch, a promotion."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict
from forkd.model.network import HOST, NetworkChange, NetworkPolicy, parse_policy
from forkd.model.sandbox import BranchOptions, ForkOptions
from tests.support import outside
from tests.support.callers import CALLER
from tests.support.namespaces import Namespace
from tests.support.outside import serving
from tests.support.real_host import REAL, shell, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from tests.support.real_host import RealHost

pytestmark = [
    REAL,
    pytest.mark.needs("nft"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

ALLOWED, OTHER = outside.PUBLIC[0], outside.OTHER[0]
ALLOWED_V6, OTHER_V6, METADATA_V6 = outside.PUBLIC[1], outside.OTHER[1], outside.METADATA[1]
PORT = 443

TRY = """
import socket
def attempt(address, port):
    try:
        with socket.create_connection((address, port), 20) as connection:
            connection.send(b"?")
            return "reached" if connection.recv(1) else "ended"
    except socket.gaierror:
        return "no such name"
    except OSError as error:
        return error.strerror or str(error)
attempt({address!r}, {port})
"""
HOST_V6 = "2001:db8:ffff::1"
NAMESERVER = "open('/etc/resolv.conf').read()"
ADDRESSES_V6 = """
import ipaddress
rows = [line.split() for line in open("/proc/net/if_inet6")]
[(str(ipaddress.IPv6Address(int(row[0], 16))), int(row[4], 16)) for row in rows if row[5] != "lo"]
"""
NODAD_AND_PERMANENT = 0x82
REPORTS = "open('/proc/sys/net/ipv6/mld_qrv').read()"
"""How often a guest reports its multicast groups when its MAC has changed."""

AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
"""Whom the host trusts to sign certificates: an authority of its own network, perhaps, too."""

INSTALL = "pip install iniconfig && python3 -c 'import iniconfig'"
UPDATE = "apt-get -o APT::Update::Error-Mode=any update"

REFUSED = "Connection refused"
UNREACHABLE = "Network is unreachable"


@pytest.fixture
def world() -> Iterator[Namespace]:
    """A world beside this host: two addresses of each family, and metadata; servers answer."""
    with Namespace() as made, Namespace.here() as here:
        here.link("fkworld", made, "down0")
        try:
            here.address("fkworld", "198.51.100.1/24", f"{HOST_V6}/64")
            made.address("down0", "198.51.100.2/24", "2001:db8:ffff::2/64")
            places = (ALLOWED, OTHER, ALLOWED_V6, OTHER_V6, METADATA_V6)
            for address in places:
                six = ":" in address
                whole = f"{address}/{128 if six else 32}"
                made.address("lo", whole)
                here.route(whole, "2001:db8:ffff::2" if six else "198.51.100.2")
            with serving(made, [(each, PORT) for each in places]):
                yield made
        finally:
            here.remove("fkworld")


def policy(*rules: str) -> NetworkPolicy:
    made = parse_policy(list(rules))
    assert made is not None
    return made


async def authorities() -> AsyncIterator[bytes]:
    """Yield the certificates of whom the host trusts."""
    yield await asyncio.to_thread(AUTHORITIES.read_bytes)


async def reach(host: RealHost, sandbox: SandboxId, address: str, port: int = PORT) -> str:
    return str(await value(host, sandbox, TRY.format(address=address, port=port)))


async def has_v6_alone(host: RealHost, sandbox: Sandbox) -> bool:
    """Whether a guest has the one IPv6 address that it was given, and may use it at once."""
    found = await value(host, sandbox.id, ADDRESSES_V6)
    return bool(found == [[sandbox.address_v6, NODAD_AND_PERMANENT]])


@pytest.mark.usefixtures("world")
async def test_a_guest_reaches_what_its_policy_allows_and_that_changes_while_it_runs(
    real_host: RealHost,
) -> None:
    networks = real_host.service.networks
    options = ForkOptions(network=policy(f"{ALLOWED}:{PORT}/tcp"))
    async with real_host.forked(1, options) as (sandbox,):
        status = await networks.get(CALLER, sandbox.id)
        assert status.gateway in await value(real_host, sandbox.id, NAMESERVER)
        assert await value(real_host, sandbox.id, REPORTS) == "1\n"
        assert await reach(real_host, sandbox.id, ALLOWED) == "reached"
        assert await reach(real_host, sandbox.id, OTHER) == REFUSED
        assert await reach(real_host, sandbox.id, status.gateway) == REFUSED
        assert await reach(real_host, sandbox.id, "example.com") == "no such name"

        allow = NetworkChange(allow=(OTHER,))
        assert len((await networks.change(CALLER, sandbox.id, allow)).policy.addresses) == 2
        assert await reach(real_host, sandbox.id, OTHER) == "reached"
        await networks.change(CALLER, sandbox.id, NetworkChange(policy=NetworkPolicy()))
        assert await reach(real_host, sandbox.id, ALLOWED) == REFUSED

        status = await networks.get(CALLER, sandbox.id)
        assert status.refused_packets >= 3
        assert {(OTHER, PORT), (ALLOWED, PORT)} <= {
            (each.address, each.port) for each in status.refused_destinations
        }
        assert [each.name for each in status.refused_names] == ["example.com"]


@pytest.mark.usefixtures("world")
async def test_a_guest_has_one_ipv6_address_and_reaches_what_its_policy_allows(
    real_host: RealHost,
) -> None:
    networks = real_host.service.networks
    options = ForkOptions(network=policy(f"[{ALLOWED_V6}]:{PORT}/tcp"))
    async with real_host.forked(2, options) as (sandbox, sibling):
        status = await networks.get(CALLER, sandbox.id)
        assert sandbox.address_v6 == status.address_v6
        assert await has_v6_alone(real_host, sandbox)

        assert await reach(real_host, sandbox.id, ALLOWED_V6) == "reached"
        others = (OTHER_V6, METADATA_V6, HOST_V6, sibling.address_v6, status.gateway_v6)
        for address in map(str, others):
            assert await reach(real_host, sandbox.id, address) == REFUSED, address
        assert await reach(real_host, sandbox.id, ALLOWED) == REFUSED

        await networks.change(CALLER, sandbox.id, NetworkChange(policy=policy("internet")))
        assert await reach(real_host, sandbox.id, OTHER_V6) == "reached"
        assert await reach(real_host, sandbox.id, METADATA_V6) == REFUSED
        assert await reach(real_host, sandbox.id, str(sibling.address_v6)) == REFUSED


@pytest.mark.usefixtures("world")
async def test_a_held_branch_reaches_nothing_until_it_is_promoted(real_host: RealHost) -> None:
    options = ForkOptions(network=policy("internet"))
    async with real_host.forked(1, options) as (parent,):
        (child,) = (
            await real_host.service.branches.branch(
                CALLER, parent.id, 1, BranchOptions(hold_egress=True)
            )
        ).fork.sandboxes
        assert child.egress_held
        assert await value(real_host, child.id, ADDRESSES_V6) == [
            [child.address_v6, NODAD_AND_PERMANENT]
        ]
        assert await reach(real_host, parent.id, ALLOWED) == "reached"
        assert await reach(real_host, child.id, ALLOWED) == REFUSED
        assert await reach(real_host, child.id, ALLOWED_V6) == REFUSED
        assert await reach(real_host, child.id, "example.com") == "no such name"

        promoted = (await real_host.service.promotions.promote(CALLER, child.id)).sandbox

        assert promoted.id == parent.id
        assert promoted.address_v6 == parent.address_v6
        assert await value(real_host, promoted.id, ADDRESSES_V6) == [
            [parent.address_v6, NODAD_AND_PERMANENT]
        ]
        assert not promoted.egress_held
        assert await reach(real_host, promoted.id, ALLOWED) == "reached"
        assert await reach(real_host, promoted.id, ALLOWED_V6) == "reached"


@pytest.mark.needs("network")
@pytest.mark.soak(only=True)  # two minutes; what they need of the network is in the tests above
async def test_packages_are_installed_by_the_ordinary_clients_where_the_internet_is_allowed(
    real_host: RealHost,
) -> None:
    async with real_host.forked(1, ForkOptions(network=policy("internet"))) as (sandbox,):
        await real_host.service.guests.write_file(
            CALLER, sandbox.id, "/root/authorities", authorities()
        )
        await shell(real_host, sandbox.id, f"export PIP_CERT=/root/authorities; {INSTALL}")
        await shell(real_host, sandbox.id, UPDATE)

    async with real_host.forked(1, ForkOptions()) as (sandbox,):
        for command in (INSTALL, UPDATE):
            said = await shell(real_host, sandbox.id, f"! {{ {command}; }} 2>&1")
            assert "Temporary failure" in said


@pytest.mark.usefixtures("world")
async def test_without_a_network_everything_fails_at_once_and_none_can_be_had_later(
    real_host: RealHost,
) -> None:
    async with real_host.forked(1, ForkOptions()) as (sandbox,):
        assert await reach(real_host, sandbox.id, ALLOWED) == UNREACHABLE
        assert await reach(real_host, sandbox.id, ALLOWED_V6) == UNREACHABLE
        with pytest.raises(Conflict, match="without a network"):
            await real_host.service.networks.change(CALLER, sandbox.id, NetworkChange(policy=HOST))
