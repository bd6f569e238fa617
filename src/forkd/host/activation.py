"""Sockets that a service manager has opened for us, as sd_listen_fds(3) describes them."""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from forkd.errors import InvalidRequest
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from forkd.host.sockets import Socket

FIRST = 3
"""The first descriptor that a manager hands over (SD_LISTEN_FDS_START)."""

HANDED_MAX = 16
"""Most descriptors that a manager may hand over."""

COUNT, PID, NAMES = "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"

_KINDS = {
    socket.SOCK_DGRAM: "a datagram socket",
    socket.SOCK_SEQPACKET: "a socket of packets in sequence",
    socket.SOCK_RAW: "a raw socket",
}


@dataclass(frozen=True, slots=True)
class Handed:
    """A listening stream socket of a manager.

    Attributes:
        name: What the manager calls it.
        sock: The socket, which no program that we start inherits.
        path: Where it is, for one of the file system; None for TCP.
    """

    name: str
    sock: Socket
    path: str | None


def take() -> list[Handed]:
    """Return what a service manager has opened for this process, once: the variables are removed.

    Variables that are for another process mean nothing.

    Raises:
        InvalidRequest: A variable makes no sense, or a descriptor is no listening stream socket of
            TCP or of a path; says which, and what it is.
    """
    said = {name: os.environ.pop(name, "") for name in (COUNT, PID, NAMES)}
    if not said[COUNT] or said[PID] != str(os.getpid()):
        return []
    if not said[COUNT].isdecimal() or int(said[COUNT]) > HANDED_MAX:
        raise InvalidRequest(
            f"{COUNT} is {said[COUNT][:80]!r}: must be a number from 0 to {HANDED_MAX}", field=COUNT
        )
    descriptors = range(FIRST, FIRST + int(said[COUNT]))
    names = said[NAMES].split(":") if said[NAMES] else ["unknown"] * len(descriptors)
    if len(names) != len(descriptors):
        raise InvalidRequest(
            f"{NAMES} has {len(names)} names, and {COUNT} is {len(descriptors)}", field=NAMES
        )
    return [_taken(name, number) for name, number in zip(names, descriptors, strict=True)]


def _taken(name: str, number: int) -> Handed:
    try:
        is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        _refuse(name, number, "is not open")
    if not is_socket:
        _refuse(name, number, "is no socket")
    with kernel_call(f"take the socket {name} of the service manager"):
        os.set_inheritable(number, False)  # noqa: FBT003 - as os has it
        sock = socket.socket(fileno=number)
    if sock.type != socket.SOCK_STREAM:
        _refuse(name, number, f"is {_KINDS.get(sock.type, 'no stream socket')}", sock)
    if sock.family not in {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}:
        _refuse(name, number, "is neither of TCP nor a Unix socket", sock)
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        _refuse(name, number, "does not listen (is Accept=yes set?)", sock)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as of `sockets.bind_tcp`
        return Handed(name, sock, None)
    path = sock.getsockname()
    if not isinstance(path, str) or not path:
        _refuse(name, number, "is in the abstract namespace, which has no permissions", sock)
    return Handed(name, sock, path)


def _refuse(name: str, number: int, problem: str, sock: Socket | None = None) -> NoReturn:
    if sock is not None:
        sock.close()
    raise InvalidRequest(
        f"the service manager's socket {name} (descriptor {number}) {problem}: the daemon takes "
        "listening stream sockets, one of a path and one of TCP (ListenStream= of a socket unit)",
        field=name,
    )
