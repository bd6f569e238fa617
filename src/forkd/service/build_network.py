"""What downloads of image builds may reach of the network.

Name servers and proxies of this host are its operator's choice, and always reached; all else that
is private, or this host, is reached only if the operator says so.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from ipaddress import ip_network
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from forkd.errors import HostError, InvalidRequest
from forkd.host import files, nftables, proc, sockets
from forkd.model.network import AddressRule, NetworkPolicy, Ports, parse_policy
from forkd.network import build_rules
from forkd.network.resolver import RESOLV_CONF, RESOLV_CONF_BYTES_MAX, upstreams_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from forkd.model.network import Protocol

ANY = "any"
"""The setting with which builds have the host's network as it is."""

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_PROXY_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}


def parse(text: str) -> NetworkPolicy | None:
    """Return what an operator lets builds reach; None for all that this host does.

    Args:
        text: `any`, or rules as of a sandbox's network, with spaces between.

    Raises:
        InvalidRequest: It is neither; the field is `build_network`.
    """
    if text.strip() == ANY:
        return None
    try:
        policy = parse_policy(text.split())
    except InvalidRequest as error:
        reason = str(error).removeprefix("network: ")
        raise InvalidRequest(f"build_network: {reason}", field="build_network") from None
    if policy is None or any(each.below for each in policy.names):
        raise InvalidRequest(
            "build_network: builds need a network, and names in full: give `internet`, `any`, or "
            "rules such as mirror.example.com:80 or 10.1.2.3:443",
            field="build_network",
        )
    return policy


@dataclass(frozen=True, slots=True)
class BuildNetwork:
    """What builds may reach, and how that is found.

    Attributes:
        policy: What their operator lets them reach.
        environment: Of the daemon: its proxies.
        resolv_conf: Names the name servers.
    """

    policy: NetworkPolicy
    environment: Mapping[str, str]
    resolv_conf: Path = RESOLV_CONF

    @classmethod
    def of(cls, policy: NetworkPolicy | None) -> Self | None:
        """Return what a policy means on this host; None if that is all that the host reaches."""
        return None if policy is None else cls(policy, proc.environment())

    def confine(self, first: int, count: int) -> None:
        """Confine the sockets of these users, until `release`; blocks.

        Names are looked up now.

        Raises:
            HostError: The kernel refused, or a name has no address.
        """
        if not nftables.is_available():
            raise HostError(
                "builds are kept from private addresses by nftables, which is not here: install "
                "libnftables1, or set FORKD_BUILD_NETWORK=any"
            )
        rules = (*self._own(), *self.policy.addresses, *self._named())
        nftables.run(build_rules.put(first, count, rules, internet=self.policy.internet))

    def _own(self) -> Iterator[AddressRule]:
        """Yield what every build has: name servers, proxies, and loopback if that is allowed."""
        said = files.read(self.resolv_conf, RESOLV_CONF_BYTES_MAX) or b""
        for address, port in upstreams_of(said.decode(errors="replace")):
            with contextlib.suppress(ValueError):  # a file that others write
                yield AddressRule((Ports(port, port),), network=ip_network(address))
        for host, port in proxies_of(self.environment):
            yield from _at(host, (Ports(port, port),))
        if self.policy.host:
            yield AddressRule(network=ip_network("127.0.0.0/8"))
            yield AddressRule(network=ip_network("::1"))

    def _named(self) -> Iterator[AddressRule]:
        for rule in self.policy.names:
            yield from _at(rule.name, rule.ports, rule.protocol)


def release(first: int) -> None:
    """Take away what confines the users from `first` on, if anything does; blocks.

    Raises:
        HostError: The kernel refused.
    """
    nftables.run(build_rules.remove(first))


def proxies_of(environment: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """Return host and port of each proxy that an environment names; what is none is left out."""
    found = []
    for name, value in environment.items():
        if name.lower() not in _PROXIES:
            continue
        try:
            url = urlsplit(value if "//" in value else f"http://{value}")
            host, port = url.hostname, url.port or _PROXY_PORTS.get(url.scheme)
        except ValueError:
            continue
        if host and port:
            found.append((host, port))
    return tuple(dict.fromkeys(found))


def _at(
    host: str, ports: tuple[Ports, ...], protocol: Protocol | None = None
) -> Iterator[AddressRule]:
    for address in sockets.addresses_of(host):
        yield AddressRule(ports, protocol, ip_network(address))
