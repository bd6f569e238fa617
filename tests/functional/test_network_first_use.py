"""When a guest has its network: a dormant one when it is first used, others before they answer.

Whether it has is seen from the host's end of its link: a guest says who has its address, and only
its own.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING

import pytest

from forkd.model.ids import parse_tag
from forkd.model.network import HOST
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import LinkRequest
from tests.support.branches import branched
from tests.support.callers import CALLER
from tests.support.real_host import FORK_DEADLINE_S, REAL, TAG, shell
from tests.support.slots import slot_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.model.sandbox import Sandbox
    from tests.support.real_host import RealHost

pytestmark = [
    REAL,
    pytest.mark.needs("nft"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

ARP = 0x0806
REQUEST, REPLY = 1, 2
DEADLINE_S = 60.0

BEFORE, AFTER = (b"\x02\x00\x00\x00\x00" + bytes([number]) for number in (1, 2))
"""Hardware addresses of who asks, by which answers are told apart."""


@contextlib.contextmanager
def wire(host: RealHost, sandbox: Sandbox) -> Iterator[socket.socket]:
    """Give the host's end of a sandbox's link."""
    tap = slot_of(host.names.network, sandbox).tap
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ARP)) as opened:
        opened.bind((tap, ARP))
        opened.settimeout(DEADLINE_S)
        yield opened


def ask(wire: socket.socket, asker: bytes, address: str | None) -> None:
    """Ask everybody on a link who has an address (RFC 826), as a probe does (RFC 5227)."""
    assert address is not None
    kinds = struct.pack("!HHBBH", 1, 0x0800, 6, 4, REQUEST)
    body = kinds + asker + bytes(4) + bytes(6) + socket.inet_aton(address)
    wire.send(b"\xff" * 6 + asker + struct.pack("!H", ARP) + body)


def answered(wire: socket.socket) -> bytes:
    """Return who is answered next."""
    while True:
        frame = wire.recv(2048)
        if struct.unpack_from("!H", frame, 20) == (REPLY,):
            return frame[:6]


async def test_a_dormant_guest_has_its_network_once_it_is_used_and_not_before(
    real_host: RealHost,
) -> None:
    async with real_host.forked(1, ForkOptions(network=HOST)) as (sandbox,):
        with wire(real_host, sandbox) as link:
            ask(link, BEFORE, sandbox.address)
            # Taken from the link before it asks its guest anything else.
            await real_host.service.guests.ping(CALLER, sandbox.id)

            await shell(real_host, sandbox.id, "true")

            ask(link, AFTER, sandbox.address)
            assert answered(link) == AFTER


@pytest.mark.soak(only=True)
async def test_a_branch_of_one_that_was_used_has_its_own_network_before_it_is_used(
    real_host: RealHost,
) -> None:
    async with real_host.forked(1, ForkOptions(network=HOST)) as (parent,):
        await shell(real_host, parent.id, "true")
        (sibling,) = await branched(real_host.service, parent.id)
        with wire(real_host, sibling) as link:
            ask(link, BEFORE, sibling.address)

            assert answered(link) == BEFORE
        await real_host.service.sandboxes.delete(CALLER, sibling.id)


async def test_a_fork_of_one_that_may_have_a_program_has_its_network_before_it_is_used(
    real_host: RealHost,
) -> None:
    request = LinkRequest(parse_tag("busy"), TAG, "sleep 600 >/dev/null 2>&1 &")
    async for _ in real_host.service.chains.extend(CALLER, request):
        pass
    options = ForkOptions(deadline_s=FORK_DEADLINE_S, network=HOST, all_or_nothing=True)
    result = await real_host.service.sandboxes.fork(CALLER, request.tag, 1, options)
    with wire(real_host, result.sandboxes[0]) as link:
        ask(link, BEFORE, result.sandboxes[0].address)

        assert answered(link) == BEFORE
    await real_host.clear()
