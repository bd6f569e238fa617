"""Requests over netlink, many in one system call.

`pyroute2` runs an event loop for each request: 32 ms of the interpreter for the four that a network
slot takes, in the helper machine, where the kernel takes 3, and a thread that is busy with it holds
back the daemon's own event loop.  So what is asked for every slot or sandbox is packed here
(`include/uapi/linux/rtnetlink.h`, `include/uapi/linux/netfilter/nfnetlink_conntrack.h`).
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

AT_ONCE = 64
"""Requests in one system call: their answers have to fit into a socket's buffer, which took 256 of
them and not 320 (`net.core.rmem_default` of 212,992)."""

_ANSWERS_BYTES = 1 << 16
_SOL_NETLINK = 270
_NETLINK_CAP_ACK = 10

ROUTE = socket.NETLINK_ROUTE
"""Who is asked about links, addresses and neighbours."""
NETFILTER = 12
"""Who is asked about connections."""

_NEW_LINK, _DELETE_LINK, _NEW_ADDRESS, _NEW_NEIGHBOUR = 16, 17, 20, 28
_NEW_ROUTE, _GET_ROUTE = 24, 26
_DELETE_CONNECTIONS = 1 << 8 | 2  # of the subsystem of connection tracking
_ERROR = 2
_REQUEST, _ACK, _REPLACE, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x100, 0x200, 0x400

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, kind, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, which of them change
_ADDRESS = struct.Struct("=BBBBi")  # ifaddrmsg: family, prefix length, flags, scope, index
_NEIGHBOUR = struct.Struct("=B3xiHBB")  # ndmsg: family, index, state, flags, type
_ROUTE = struct.Struct("=BBBBBBBBI")  # rtmsg: family, prefix length, …; the eighth is its type
_FILTER = struct.Struct("=BBH")  # nfgenmsg: family (0 for all), version, resource
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, kind
_ERRNO = struct.Struct("=i")
_U32 = struct.Struct("=I")
_NETWORK_U32 = struct.Struct("!I")

_UP = 1
_LINK_GROUP = 27
_LOCAL, _PEER = 2, 1
_DESTINATION, _LINK_ADDRESS = 1, 2
_TO = 1
_LOCAL_TYPE, _MULTICAST_TYPE = 2, 5  # between them: broadcast and anycast
_NO_DAD = 0x02
_PERMANENT = 0x80
_MARK, _MARK_MASK = 8, 21


@dataclass(frozen=True, slots=True)
class Request:
    """A message for the kernel, without its number.

    Attributes:
        kind: RTM_… for `ROUTE`.
        flags: NLM_F_…, beyond those that every request has.
        body: What follows the header.
    """

    kind: int
    flags: int
    body: bytes


def set_up(index: int) -> Request:
    """Set the link at an index up."""
    return Request(_NEW_LINK, 0, _LINK.pack(0, 0, index, _UP, _UP))


def put_in_group(index: int, group: int) -> Request:
    """Make a link one of a group, and of no other."""
    body = _LINK.pack(0, 0, index, 0, 0) + _attribute(_LINK_GROUP, _U32.pack(group))
    return Request(_NEW_LINK, 0, body)


def delete_group(group: int) -> Request:
    """Remove all links of a group."""
    body = _LINK.pack(0, 0, 0, 0, 0) + _attribute(_LINK_GROUP, _U32.pack(group))
    return Request(_DELETE_LINK, 0, body)


def add_address(index: int, address: str, prefix_length: int) -> Request:
    """Give a link an address that it has not; whether another has it is not asked on the link."""
    family, raw = _raw(address)
    flags = _NO_DAD if family == socket.AF_INET6 else 0
    body = _ADDRESS.pack(family, prefix_length, flags, 0, index)
    body += _attribute(_LOCAL, raw) + _attribute(_PEER, raw)
    return Request(_NEW_ADDRESS, _CREATE | _EXCLUSIVE, body)


def set_neighbour(index: int, address: str, mac: str) -> Request:
    """Say which hardware address is behind an address, for good."""
    family, raw = _raw(address)
    body = _NEIGHBOUR.pack(family, index, _PERMANENT, 0, 0)
    body += _attribute(_DESTINATION, raw)
    body += _attribute(_LINK_ADDRESS, bytes.fromhex(mac.replace(":", "")))
    return Request(_NEW_NEIGHBOUR, _CREATE | _REPLACE, body)


def forget_connections(mark: int) -> Request:
    """Forget the connections that bear a mark."""
    body = _FILTER.pack(0, 0, 0) + _attribute(_MARK, _NETWORK_U32.pack(mark))
    body += _attribute(_MARK_MASK, _NETWORK_U32.pack(0xFFFF_FFFF))
    return Request(_DELETE_CONNECTIONS, 0, body)


def ask(requests: Sequence[Request], protocol: int = ROUTE) -> list[int]:
    """Have the kernel do all of these in order, whether or not those before were refused.

    Args:
        requests: Of one protocol.
        protocol: Which that is.

    Returns:
        What it said of each, in order: 0, or an errno.

    Raises:
        OSError: It is not to be asked at all; how much of it was done is not known.
    """
    said = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as kernel:
        kernel.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)  # answers without the questions
        for start in range(0, len(requests), AT_ONCE):
            said += _ask_at_once(kernel, requests[start : start + AT_ONCE])
    return said


def is_taken_here(address: str) -> bool:
    """Whether this host itself takes what it sends to an address: its own, broadcast, multicast.

    Raises:
        OSError: The kernel is not to be asked at all.
    """
    family, raw = _raw(address)
    body = _ROUTE.pack(family, 8 * len(raw), 0, 0, 0, 0, 0, 0, 0) + _attribute(_TO, raw)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, ROUTE) as kernel:
        kernel.send(_numbered(Request(_GET_ROUTE, 0, body), 0))
        said = kernel.recv(_ANSWERS_BYTES)
    if _HEADER.unpack_from(said)[1] != _NEW_ROUTE:
        return False  # no route leads there
    type_: int = _ROUTE.unpack_from(said, _HEADER.size)[7]
    return _LOCAL_TYPE <= type_ <= _MULTICAST_TYPE


def check(said: Sequence[int]) -> None:
    """Raise the first refusal among answers.

    Raises:
        OSError: There is one.
    """
    for number in said:
        if number:
            raise OSError(number, os.strerror(number))


def _ask_at_once(kernel: socket.socket, requests: Sequence[Request]) -> list[int]:
    kernel.send(b"".join(_numbered(each, number) for number, each in enumerate(requests)))
    said: dict[int, int] = {}
    while len(said) < len(requests):
        said.update(_answers(kernel.recv(_ANSWERS_BYTES)))
    return [said[number] for number in range(len(requests))]


def _numbered(request: Request, number: int) -> bytes:
    length = _HEADER.size + len(request.body)
    header = _HEADER.pack(length, request.kind, _REQUEST | _ACK | request.flags, number, 0)
    return header + request.body


def _answers(data: bytes) -> Iterator[tuple[int, int]]:
    """Cut what the kernel sent into numbers of requests and what it says of them."""
    while data:
        length, kind, _, number, _ = _HEADER.unpack_from(data)
        if kind == _ERROR:
            yield number, -_ERRNO.unpack_from(data, _HEADER.size)[0]
        data = data[_padded(length) :]


def _attribute(kind: int, value: bytes) -> bytes:
    packed = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value
    return packed.ljust(_padded(len(packed)), b"\0")


def _padded(length: int) -> int:
    return (length + 3) & ~3


def _raw(address: str) -> tuple[int, bytes]:
    parsed = ip_address(address)
    return (socket.AF_INET if parsed.version == 4 else socket.AF_INET6), parsed.packed  # noqa: PLR2004
