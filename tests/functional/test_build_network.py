"""What downloads of builds reach of a real network: what is public, and what their operator allows.

Their programs are told by their user, so tries are made here as one of them.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import programs
from forkd.errors import HostError
from forkd.host import nftables
from forkd.limits import BUILD_UIDS_DEFAULT
from forkd.network.build_rules import table_name
from forkd.service import build_network
from forkd.service.build_network import BuildNetwork
from forkd.service.cells import UIDS_MIN, Cells
from forkd.service.jail import UidRange
from tests.support.outside import (
    HOST_OUTSIDE,
    METADATA,
    OTHER,
    PRIVATE,
    PROTOCOLS,
    PUBLIC,
    Outside,
    attempt,
    outside,
    serving,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.needs("root", "nft")]

FIRST, COUNT = 2_100_000_000, 10
FAMILIES = (0, 1)
LOOPBACK = ("127.0.0.1", "::1")
REACHED, REFUSED = "reached", "refused"

_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(scope="module")
def world() -> Iterator[Outside]:
    with outside(guests=1) as made:
        yield made


def try_(
    world: Outside, address: str, *, port: int = 443, protocol: str = "tcp", uid: int = FIRST
) -> str:
    """Have a user of the host try a destination."""

    def inside() -> str:
        _libc.setfsuid(uid)  # of this thread alone, which ends with this
        try:
            return attempt(protocol, address, port)
        except PermissionError:  # what the kernel says of packets that do not leave it
            return REFUSED

    return world.host.run(inside)


def confine(world: Outside, network: BuildNetwork) -> None:
    world.host.run(lambda: network.confine(FIRST, COUNT))


@pytest.fixture
def released(world: Outside) -> Iterator[None]:
    """Take away what confines builds, after a test."""
    yield
    world.host.run(lambda: build_network.release(FIRST))


def network(tmp_path: Path, rules: str = "internet", **variables: str) -> BuildNetwork:
    """Return what a host lets builds reach whose name server is private."""
    policy = build_network.parse(rules)
    assert policy is not None
    servers = tmp_path / "resolv.conf"
    servers.write_text(f"nameserver of.ours\nnameserver {PRIVATE[0]}\n")  # the first is none
    return BuildNetwork(policy, variables, servers)


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_build_reaches_what_is_public_and_nothing_else(
    world: Outside, tmp_path: Path, family: int, protocol: str
) -> None:
    confine(world, network(tmp_path))

    places = {"public": PUBLIC, "private": PRIVATE, "metadata": METADATA, "host": HOST_OUTSIDE}
    port = {"metadata": 80}
    found = {
        name: try_(world, pair[family], port=port.get(name, 443), protocol=protocol)
        for name, pair in places.items()
    }

    refused = dict.fromkeys(("private", "metadata", "host"), REFUSED)
    assert found == {"public": REACHED, **refused}
    assert try_(world, LOOPBACK[family], protocol=protocol) == REFUSED


@pytest.mark.usefixtures("released")
def test_users_that_build_nothing_reach_what_they_did(world: Outside, tmp_path: Path) -> None:
    confine(world, network(tmp_path))

    assert try_(world, PRIVATE[0], uid=FIRST + COUNT - 1) == REFUSED
    for uid in (0, FIRST - 1, FIRST + COUNT):
        assert try_(world, PRIVATE[0], uid=uid) == REACHED


@pytest.mark.usefixtures("released")
def test_name_servers_and_proxies_of_the_host_are_reached_at_their_ports(
    world: Outside, tmp_path: Path
) -> None:
    confine(world, network(tmp_path, https_proxy=f"http://[{PRIVATE[1]}]:80"))

    assert try_(world, PRIVATE[0], port=53) == REACHED
    assert try_(world, PRIVATE[0], port=53, protocol="udp") == REACHED
    assert try_(world, PRIVATE[1], port=80) == REACHED
    for address, port in ((PRIVATE[0], 80), (PRIVATE[1], 53), (PRIVATE[1], 443)):
        assert try_(world, address, port=port) == REFUSED


@pytest.mark.usefixtures("released")
def test_an_operator_allows_private_mirrors_and_nothing_else(
    world: Outside, tmp_path: Path
) -> None:
    confine(world, network(tmp_path, f"{PRIVATE[0]}:443/tcp [{PRIVATE[1]}]:80"))

    assert try_(world, PRIVATE[0]) == REACHED
    assert try_(world, PRIVATE[1], port=80) == REACHED
    for address in (PUBLIC[0], OTHER[1], METADATA[0], HOST_OUTSIDE[0]):
        assert try_(world, address, port=80) == REFUSED
    assert try_(world, PRIVATE[0], protocol="udp") == REFUSED


@pytest.mark.usefixtures("released")
def test_the_word_host_opens_loopback(world: Outside, tmp_path: Path) -> None:
    confine(world, network(tmp_path, "internet host"))

    with serving(world.host, [(address, 443) for address in LOOPBACK]):
        for address in LOOPBACK:
            assert try_(world, address) == REACHED
    assert try_(world, HOST_OUTSIDE[0]) == REFUSED


def test_what_was_released_reaches_all_again(world: Outside, tmp_path: Path) -> None:
    confine(world, network(tmp_path))
    confine(world, network(tmp_path))  # what a killed daemon left is replaced
    assert try_(world, PRIVATE[0]) == REFUSED

    world.host.run(lambda: build_network.release(FIRST))

    assert try_(world, PRIVATE[0]) == REACHED
    assert world.host.run(nftables.tables) == set()


def test_a_name_without_an_address_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"mirror\.invalid has no address"):
        network(tmp_path, "mirror.invalid:80").confine(FIRST, COUNT)


def test_without_nftables_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nftables, "is_available", lambda: False)

    with pytest.raises(HostError, match="set FORKD_BUILD_NETWORK=any"):
        network(tmp_path).confine(FIRST, COUNT)


@pytest.mark.needs("binaries")
def test_a_program_in_a_builds_cell_does_not_reach_the_host(tmp_path: Path) -> None:
    code = "import socket,sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 20)"
    uids = UidRange.parse(BUILD_UIDS_DEFAULT)
    vmm = programs.find(programs.VMM)
    results = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = ["/usr/bin/python3", "-c", code, str(server.getsockname()[1])]
        for reach in (network(tmp_path), None):
            with Cells(vmm, uids, None, None, reach).build() as cell:
                table = table_name(cell.uid)
                confined = table in nftables.tables()
                done = subprocess.run(  # noqa: S603 - our own
                    cell.command(words, network=True), capture_output=True, check=False, timeout=60
                )
            results.append((confined, done.returncode == 0, b"ConnectionRefused" in done.stderr))
            assert table not in nftables.tables()

    assert results == [(True, False, True), (False, True, False)]


def test_what_a_killed_daemon_left_is_removed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    uids = UidRange(FIRST, UIDS_MIN)
    builds = Cells(Path("/vmm"), uids, None, None, network(tmp_path))
    later = FIRST + 65_536

    with builds.build() as cell:
        network(tmp_path).confine(later, 65_536)
        assert builds.tidy() == [table_name(later)]
        assert table_name(cell.uid) in nftables.tables()

    assert not {table_name(FIRST), table_name(later)} & nftables.tables()
