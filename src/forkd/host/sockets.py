"""Unix sockets: made, bound, and whose they are."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import struct
from typing import TYPE_CHECKING

from forkd.errors import HostError
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Socket = socket.socket

PATH_BYTES_MAX = 107
"""Longest path of a Unix socket: Linux's 108 bytes (`sun_path`), with the NUL at its end."""

NOTIFY_VARIABLE = "NOTIFY_SOCKET"
"""The environment variable that has the address of a service manager, for `notify_manager`."""

QUEUE_RETRY_S = 0.005
"""How long after the queue of a listener was full it is tried again: no event says when it has
room."""

PORT_TRIES = 16
"""How many ports are tried until one is free for both of what is to have it."""

_ORIGINAL_DESTINATION = 80
"""SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST (linux/netfilter_ipv4.h, netfilter_ipv6)."""

_SOCKADDR = struct.Struct("=HH4s8x")
_SOCKADDR_V6 = struct.Struct("=HHI16sI")

_UCRED = struct.Struct("iII")


async def connected(path: Path) -> Socket | None:
    """Return a socket that does not block and is connected to `path`; None if nobody listens there.

    Waits as long as more are waiting there than the listener has room for.  The event loop's own
    `sock_connect` would take that for a connection, which a Unix socket never makes later.

    Raises:
        CapacityError: There are too many open files.
        HostError: The kernel refused.
    """
    with kernel_call(f"connect to {path}"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            while not _connects(sock, path):  # noqa: ASYNC110 - see `QUEUE_RETRY_S`
                await asyncio.sleep(QUEUE_RETRY_S)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock


def _connects(sock: Socket, path: Path) -> bool:
    """Connect a socket; return False if the listener has no room for it now."""
    try:
        sock.connect(str(path))
    except BlockingIOError:
        return False
    return True


def descriptors_max() -> int:
    """Return how many descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def has_input(sock: Socket) -> bool:
    """Whether something can be read now, the end of the stream or an error included."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_unix(sock: Socket) -> bool:
    """Whether it is a Unix socket."""
    return sock.family == socket.AF_UNIX


def first_byte(sock: Socket) -> bytes:
    """Return the next byte, which stays to be read; empty at the end.

    Raises:
        HostError: The peer is lost, or there is nothing to read yet.
    """
    with kernel_call("look at what a client says"):
        return sock.recv(1, socket.MSG_PEEK)


def end_writing(sock: Socket) -> None:
    """Say that nothing more will be written.

    Raises:
        HostError: The peer is lost.
    """
    with kernel_call("end a connection"):
        sock.shutdown(socket.SHUT_WR)


def peer_credentials(sock: Socket) -> tuple[int, int, int]:
    """Return the process, user and group at the other end, as the kernel knew them at connect.

    Raises:
        HostError: It is no connected Unix socket.
    """
    with kernel_call("ask who is at the other end of a socket"):
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    return int(pid), int(uid), int(gid)


def shut_down(sock: Socket) -> None:
    """End both directions, which wakes whoever waits for it; a lost peer is fine."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def bind_unix(path: Path, mode: int, backlog: int, group: int | None = None) -> Socket:
    """Return a listening socket at `path`, which had its final mode from the start.

    Args:
        path: Where; its folder is made, open to all, if it is missing.
        mode: Of the socket.
        backlog: How many clients wait at most.
        group: Whose the socket is as well; None for the group of this process.

    Raises:
        HostError: The kernel refused.
    """
    with kernel_call(f"listen on {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o777 & ~mode)
        try:
            bound.bind(str(path))
            if group is not None:
                os.chown(path, -1, group)
            bound.listen(backlog)
        except BaseException:
            bound.close()
            raise
        finally:
            os.umask(mask)
    return bound


def is_served(path: Path) -> bool | None:
    """Whether somebody listens at `path`; None if there is nothing of that name.

    Raises:
        HostError: The kernel does not say.
    """
    with (
        kernel_call(f"look who listens on {path}"),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
    ):
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return None
        except ConnectionRefusedError:
            return False
        return True


def notify_manager(state: str) -> None:
    """Tell the service manager that started us, if one waits to be told, as sd_notify(3) does.

    Args:
        state: Such as `READY=1`.

    Raises:
        HostError: It does not listen where it said.
    """
    address = os.environ.get(NOTIFY_VARIABLE, "")
    if not address:
        return
    if address.startswith("@"):  # in the abstract namespace
        address = f"\0{address[1:]}"
    with (
        kernel_call("tell the service manager that waits for us"),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock,
    ):
        sock.sendto(state.encode(), address)


def take_name(name: str) -> Socket | None:
    """Take a name that one process of this network namespace can have; None if another has it.

    It is given back when the socket is closed, or the process ends: an address in the abstract
    namespace (unix(7)) leaves no file.
    """
    with kernel_call(f"take the name {name}"):
        taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            taken.bind(f"\0{name}")
        except BaseException as error:
            taken.close()
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                return None
            raise
        return taken


def bind_tcp(host: str, port: int, backlog: int) -> Socket:
    """Return a listening socket at an address; port 0 lets the kernel choose.

    What is sent over its connections goes out as it comes.  Otherwise the end of each answer waits
    until its beginning is acknowledged, which clients put off by 40 ms (Nagle's algorithm, RFC 896;
    asyncio turns it off for sockets alone that name their protocol).

    Raises:
        HostError: The name has no address, or the kernel refused.
    """
    with kernel_call(f"listen on {host}:{port}"):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=backlog)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
        return sock


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a name, or the address that it is; blocks.

    Raises:
        HostError: It has none, or nobody knows.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise HostError(f"{host} has no address: {error}", host=host) from error
    return list(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def send_files(sock: Socket, data: bytes, files: Sequence[int]) -> int:
    """Send bytes with descriptors over a Unix socket; return how many of the bytes were sent."""
    return socket.send_fds(sock, [data], files)


def bind_tcp_and_udp(*, ipv6: bool) -> tuple[tuple[Socket, Socket], ...]:
    """Return a listening socket and one for packets, on one port of every address.

    Args:
        ipv6: Whether there is another pair, on the same port of every IPv6 address.

    Raises:
        HostError: The kernel refused, or no port was free for all.
    """
    families = (socket.AF_INET, socket.AF_INET6) if ipv6 else (socket.AF_INET,)
    with kernel_call("listen for questions of sandboxes"):
        for attempt in range(PORT_TRIES):
            with contextlib.ExitStack() as stack:
                port, pairs = 0, []
                try:
                    for family in families:
                        listener = socket.create_server(("", port), family=family)
                        port = stack.enter_context(listener).getsockname()[1]
                        packets = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
                        if family == socket.AF_INET6:
                            packets.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                        packets.bind(("", port))
                        pairs.append((listener, packets))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or attempt == PORT_TRIES - 1:
                        raise
                else:
                    stack.pop_all()
                    return tuple(pairs)
    raise AssertionError  # the last try returns or raises


def bind_tcp_everywhere(backlog: int) -> tuple[Socket, ...]:
    """Return sockets that listen on one port of every address of IPv4, and of IPv6 if it is there.

    They do not block.

    Raises:
        HostError: The kernel refused, or no port was free for both.
    """
    with kernel_call("listen for connections of sandboxes"):
        for attempt in range(PORT_TRIES):
            listener = socket.create_server(("", 0), backlog=backlog)
            listener.settimeout(0)
            try:
                port = listener.getsockname()[1]
                other = socket.create_server(("::", port), family=socket.AF_INET6, backlog=backlog)
            except OSError as error:
                if error.errno in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
                    return (listener,)
                listener.close()
                if error.errno != errno.EADDRINUSE or attempt == PORT_TRIES - 1:
                    raise
            else:
                other.settimeout(0)
                return listener, other
    raise AssertionError  # the last try returns or raises


def original_destination(sock: Socket) -> tuple[str, int] | None:
    """Return where a connection was going before the packet filter led it here; None if nowhere."""
    try:
        if sock.family == socket.AF_INET6:
            raw = sock.getsockopt(socket.IPPROTO_IPV6, _ORIGINAL_DESTINATION, _SOCKADDR_V6.size)
            _, port, _, address, _ = _SOCKADDR_V6.unpack(raw)
        else:
            raw = sock.getsockopt(socket.SOL_IP, _ORIGINAL_DESTINATION, _SOCKADDR.size)
            _, port, address = _SOCKADDR.unpack(raw)
    except OSError:
        return None
    found = socket.inet_ntop(sock.family, address), socket.ntohs(port)
    return None if found == sock.getsockname()[:2] else found


async def peek(sock: Socket, least: int, bytes_max: int) -> bytes:
    """Return the next bytes, which stay to be read, once there are `least` or no more will come.

    Raises:
        OSError: The peer is lost.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    try:
        return sock.recv(bytes_max, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


def pass_on_at_once(sock: Socket) -> None:
    """Have a connection's bytes sent as they come, and the kernel notice when its peer is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def reset(sock: Socket) -> None:
    """Close a connection so that its peer is told that it was no orderly end."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
