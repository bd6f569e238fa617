"""Network namespaces without names: they go with their last descriptor, and leave nothing.

A function that runs in one may make sockets that it returns: a socket stays in the namespace that
it was made in.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from pyroute2 import IPRoute

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_BY_ROUTER = 9
"""RTPROT_RA."""
_libc = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """A network namespace, with its loopback up."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _in_thread(_make) if descriptor is None else descriptor

    @classmethod
    def here(cls) -> Self:
        """Return the namespace of this thread."""
        return cls(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self.descriptor)

    def run(self, work: Callable[[], T]) -> T:
        """Do `work` in a thread that is in this namespace."""

        def inside() -> T:
            _check(_libc.setns(self.descriptor, _CLONE_NEWNET))
            return work()

        return _in_thread(inside)

    def link(self, name: str, other: Namespace, other_name: str, *, mac: str | None = None) -> None:
        """Make a pair of links: `name` here, `other_name` there; both up, without addresses.

        Args:
            name: Of our end.
            other: Where the other end is.
            other_name: Of the other end.
            mac: Hardware address of the other end; None for any.
        """

        def make() -> None:
            with IPRoute() as route:
                peer = {"ifname": other_name, "net_ns_fd": other.descriptor}
                if mac is not None:
                    peer["address"] = mac
                route.link("add", ifname=name, kind="veth", peer=peer)
                _up(route, name)

        self.run(make)
        other.run(lambda: _with_route(lambda route: _up(route, other_name)))

    def mtu(self, link: str, size: int) -> None:
        """Set the longest packet of a link."""

        def change(route: IPRoute) -> None:
            route.link("set", index=route.link_lookup(ifname=link)[0], mtu=size)

        self.run(lambda: _with_route(change))

    def address(self, link: str, *addresses: str) -> None:
        """Give a link addresses, each with its prefix length."""

        def add(route: IPRoute) -> None:
            index = route.link_lookup(ifname=link)[0]
            for each in addresses:
                address, _, length = each.partition("/")
                extra = {"flags": 2} if ":" in address else {}  # without duplicate detection
                route.addr("add", index=index, address=address, prefixlen=int(length), **extra)

        self.run(lambda: _with_route(add))

    def remove(self, link: str) -> None:
        """Remove a link, and the other end of its pair."""

        def delete(route: IPRoute) -> None:
            route.link("del", index=route.link_lookup(ifname=link)[0])

        self.run(lambda: _with_route(delete))

    def gateway(self, *gateways: str) -> None:
        """Have everything go by a gateway."""

        def add(route: IPRoute) -> None:
            for each in gateways:
                family = 10 if ":" in each else 2
                route.route("add", dst="default", gateway=each, family=family)

        self.run(lambda: _with_route(add))

    def route(self, network: str, gateway: str) -> None:
        """Have a network go by a gateway."""
        self.run(lambda: _with_route(lambda route: _add_route(route, network, gateway)))

    def learned_routers(self) -> list[str]:
        """Return the links by which everything goes because a router there has said so."""

        def learned(route: IPRoute) -> list[str]:
            found = [
                each.get_attr("RTA_OIF")
                for each in route.get_default_routes(family=socket.AF_INET6)
                if each["proto"] == _BY_ROUTER
            ]
            return [socket.if_indextoname(each) for each in found]

        return self.run(lambda: _with_result(learned))

    def setting(self, name: str) -> str:
        """Return one of the namespace's settings, by its path below /proc/sys/net."""
        return self.run(lambda: Path("/proc/sys/net", name).read_text().strip())

    def sysctl(self, name: str, value: str) -> None:
        """Set one of the namespace's settings, by its path below /proc/sys/net."""
        self.run(lambda: Path("/proc/sys/net", name).write_text(value))


_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
"""A new namespace has what this host has, on which Docker may run.  Source: the kernel's
`net.core.devconf_inherit_init_net`."""


def _make() -> int:
    _check(_libc.unshare(_CLONE_NEWNET))
    _with_route(lambda route: _up(route, "lo"))
    _FORWARDING.write_text("0")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _with_route(work: Callable[[IPRoute], None]) -> None:
    _with_result(work)


def _with_result(work: Callable[[IPRoute], T]) -> T:
    with IPRoute() as route:
        return work(route)


def _add_route(route: IPRoute, network: str, gateway: str) -> None:
    route.route("replace", dst=network, gateway=gateway)


def _up(route: IPRoute, name: str) -> None:
    route.link("set", index=route.link_lookup(ifname=name)[0], state="up")


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_thread(work: Callable[[], T]) -> T:
    """Do `work` in a thread of its own, whose namespace is its alone."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised by the caller
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
