"""What is asked of the kernel over netlink at once is answered one by one, and in order."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import pytest
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTSocket

from forkd.host import nftables, nlmsg
from tests.support.namespaces import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root")

MARKING = """
table inet marking {
    chain sent {
        type filter hook output priority 0;
        udp dport 7000 ct mark set 7
        udp dport 8000 ct mark set 8
    }
}
"""

LOOPBACK = 1
"""The loopback link's index in every network namespace."""
NO_LINK = 1 << 20


@pytest.fixture
def host() -> Iterator[Namespace]:
    with Namespace() as namespace:
        yield namespace


def test_each_answer_is_that_to_its_request_and_a_refusal_stops_none_that_follow(
    host: Namespace,
) -> None:
    address = nlmsg.add_address(LOOPBACK, "192.0.2.1", 32)
    requests = [address, nlmsg.set_up(NO_LINK), address, nlmsg.set_up(LOOPBACK)]

    said = host.run(lambda: nlmsg.ask(requests))

    assert said == [0, errno.ENODEV, errno.EEXIST, 0]


def test_more_answers_come_than_a_sockets_buffer_has_room_for(host: Namespace) -> None:
    requests = [nlmsg.set_up(LOOPBACK)] * 5_000 + [nlmsg.set_up(NO_LINK)]

    said = host.run(lambda: nlmsg.ask(requests))

    assert said == [0] * 5_000 + [errno.ENODEV]


def test_links_are_removed_by_a_group_and_others_stay(host: Namespace) -> None:
    with Namespace() as guest:
        for name in ("first", "second", "third"):
            host.link(name, guest, f"{name}-far", mac="02:00:00:00:00:01")
        indexes = host.run(lambda: {name: index for index, name in socket.if_nameindex()})
        ours = [indexes["first"], indexes["third"]]
        requests = [nlmsg.put_in_group(index, 7) for index in ours]

        said = host.run(lambda: nlmsg.ask([*requests, nlmsg.delete_group(7)]))

        left = host.run(lambda: [name for _, name in socket.if_nameindex()])
    assert (said, left) == ([0, 0, 0], ["lo", "second"])


@pytest.mark.needs("nft")
def test_connections_of_a_mark_are_forgotten_and_others_stay(host: Namespace) -> None:
    def send() -> None:
        nftables.run(MARKING)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for port in (7_000, 8_000):
                sender.sendto(b"?", ("127.0.0.1", port))

    host.run(send)
    before = host.run(marks)

    said = host.run(lambda: nlmsg.ask([nlmsg.forget_connections(7)], nlmsg.NETFILTER))

    assert (said, before, host.run(marks)) == ([0], {7, 8}, {8})


def marks() -> set[int]:
    """Return the marks of all tracked connections."""
    with NFCTSocket() as tracked:
        return {each.get_attr("CTA_MARK") for each in tracked.dump()}
