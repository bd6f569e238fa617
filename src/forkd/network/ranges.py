"""Which addresses are public, and rules as disjoint ranges of addresses and ports; pure.

The kernel's sets of ranges take no two elements that overlap, but rules may: they are cut into
pieces that do not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from forkd.errors import InvalidRequest
from forkd.model.network import ALL_PORTS, AddressRule, Ports, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forkd.model.network import IpNetwork, NetworkPolicy

Address: TypeAlias = IPv4Address | IPv6Address

POLICIES_KEPT = 8
"""How many policies are kept cut into pieces: all children of a fork have the same."""

SPECIAL_V4 = tuple(
    IPv4Network(each)
    for each in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by carriers
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's WireServer, which trusts whatever comes from a machine
        "169.254.0.0/16",  # link-local, and the metadata services of clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.88.99.0/24",  # relays that are no more
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks of networks
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
"""IPv4 addresses that are not public: the IANA registry of special-purpose addresses, and one of
Azure's that its own machines alone reach.

The documentation ranges are not here: nothing answers there, but for tests.
"""

SPECIAL_V6 = tuple(
    IPv6Network(each)
    for each in (
        "::/3",  # unspecified, loopback, IPv4-mapped, translated (64:ff9b::/96)
        "2001::/32",  # Teredo, which embeds IPv4 addresses
        "2002::/16",  # 6to4, likewise
        "4000::/2",  # not assigned
        "8000::/1",  # not assigned; private (fc00::/7), link-local (fe80::/10), multicast
    )
)
"""IPv6 addresses that are not public: what is not in 2000::/3, and what embeds IPv4 there."""

MAPPED = IPv6Network("::ffff:0:0/96")
"""IPv6 addresses that the host's own sockets take for IPv4 addresses."""

OWN_V4 = (IPv4Network("0.0.0.0/8"), IPv4Network("127.0.0.0/8"))
OWN_V6 = (IPv6Network("::/127"), MAPPED)
"""Addresses that mean this host to its own sockets, whatever its links have: no sandbox reaches
them, whatever its policy."""

PIECES_MAX = 4_096
"""Most pieces, for one protocol, into which overlapping rules are cut."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A range of addresses as numbers, both ends included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Addresses and ports that a policy allows; no two of a policy overlap.

    Attributes:
        version: 4 or 6.
        span: The addresses.
        protocol: What is allowed there.
        ports: Which ports; None for ICMP, which has none.
    """

    version: int
    span: Span
    protocol: Protocol
    ports: Ports | None


def is_public(address: Address) -> bool:
    """Whether an address may be reached by `internet`, and be what a public name resolves to."""
    special = SPECIAL_V4 if address.version == 4 else SPECIAL_V6  # noqa: PLR2004 - IPv4
    return not any(address in each for each in special)


def allows(rules: Iterable[AddressRule], address: Address) -> bool:
    """Whether one of `rules` is for an address, whatever its ports."""
    number = int(address)
    return any(
        span.first <= number <= span.last
        for rule in rules
        if rule.network.version == address.version
        for span in _spans(rule.network)
    )


def permits(policy: NetworkPolicy, address: Address, protocol: Protocol, port: int) -> bool:
    """Whether a policy allows an address at a port by itself, and not by a name."""
    if policy.internet and is_public(address):
        return True
    number = int(address)
    return any(
        each.span.first <= number <= each.span.last
        for each in pieces(policy.addresses)
        if each.version == address.version
        and each.protocol is protocol
        and (each.ports is None or each.ports.first <= port <= each.ports.last)
    )


def is_own(address: Address) -> bool:
    """Whether an address means this host, whatever its links have."""
    own = OWN_V4 if address.version == 4 else OWN_V6  # noqa: PLR2004 - IPv4
    return any(address in each for each in own)


def check(policy: NetworkPolicy, pools: Iterable[IpNetwork]) -> None:
    """Return if the packet filter can hold a policy, and each of its rules can allow something.

    Args:
        policy: Which.
        pools: Where the addresses of sandboxes' links come from.

    Raises:
        InvalidRequest: Its rules overlap in too many ways, or one is only for addresses that no
            sandbox ever reaches.
    """
    pools = tuple(pools)
    for rule in policy.addresses:
        if any(_contains(each, rule.network) for each in (*OWN_V4, *OWN_V6)):
            raise InvalidRequest(
                f"network: {rule}: no sandbox reaches the host's loopback; `host` allows the "
                "host's end of the sandbox's own link",
                field="network",
            )
        if any(_contains(each, rule.network) for each in pools):
            listed = " and ".join(map(str, pools))
            raise InvalidRequest(
                f"network: {rule}: sandboxes' links have the addresses {listed}, and no sandbox "
                "reaches another's link; `host` allows the host's end of its own",
                field="network",
            )
    pieces(policy.addresses)


def _contains(network: IpNetwork, other: IpNetwork) -> bool:
    return network.version == other.version and other.subnet_of(network)  # type: ignore[arg-type]  # of one version


@lru_cache(maxsize=POLICIES_KEPT)
def pieces(rules: tuple[AddressRule, ...]) -> tuple[Piece, ...]:
    """Return what `rules` allow, cut so that no two pieces overlap.

    A range that contains ranges that are not public means what is public of it; one that lies in
    such a range means what it says.

    Raises:
        InvalidRequest: They overlap in too many ways.
    """
    found: list[Piece] = []
    for version in (4, 6):
        for protocol in Protocol:
            chosen = [
                (span, ports)
                for rule in rules
                if rule.network.version == version and protocol in rule.protocols
                for span in _spans(rule.network)
                for ports in rule.ports or ALL_PORTS
            ]
            for span, ports in _disjoint(chosen):
                kept = None if protocol is Protocol.ICMP else ports
                found.append(Piece(version, span, protocol, kept))
    return tuple(found)


def _spans(network: IpNetwork) -> list[Span]:
    whole = Span(int(network.network_address), int(network.broadcast_address))
    special = SPECIAL_V4 if isinstance(network, IPv4Network) else SPECIAL_V6
    bounds = sorted(Span(int(s.network_address), int(s.broadcast_address)) for s in special)
    if any(hole.first <= whole.first and whole.last <= hole.last for hole in bounds):
        return [whole]
    spans, first = [], whole.first
    for hole in bounds:
        if hole.last < whole.first or hole.first > whole.last:
            continue
        if first < hole.first:
            spans.append(Span(first, hole.first - 1))
        first = hole.last + 1
    if first <= whole.last:
        spans.append(Span(first, whole.last))
    return spans


def _disjoint(chosen: Iterable[tuple[Span, Ports]]) -> list[tuple[Span, Ports]]:
    """Cut at every end of a span, merge the ports of each part, join parts with the same ports.

    Raises:
        InvalidRequest: It makes more than `PIECES_MAX`.
    """
    begins: dict[int, list[Ports]] = {}
    ends: dict[int, list[Ports]] = {}
    for span, ports in chosen:
        begins.setdefault(span.first, []).append(ports)
        ends.setdefault(span.last + 1, []).append(ports)
    open_: Counter[Ports] = Counter()
    cuts = sorted({*begins, *ends})
    parts: list[tuple[Span, tuple[Ports, ...]]] = []
    count = 0
    for first, after in pairwise(cuts):
        open_.update(begins.get(first, ()))
        open_.subtract(ends.get(first, ()))
        open_ = +open_
        merged = _merged(open_)
        if parts and parts[-1][0].last + 1 == first and parts[-1][1] == merged:
            parts[-1] = (Span(parts[-1][0].first, after - 1), merged)
        elif merged:
            parts.append((Span(first, after - 1), merged))
        count += len(merged)
        if count > PIECES_MAX:
            raise InvalidRequest(
                f"network: the rules overlap in more than {PIECES_MAX} ways; give fewer",
                field="network",
            )
    return [(span, each) for span, ports in parts for each in ports]


def _merged(ports: Iterable[Ports]) -> tuple[Ports, ...]:
    merged: list[Ports] = []
    for each in sorted(ports):
        if merged and each.first <= merged[-1].last + 1:
            merged[-1] = Ports(merged[-1].first, max(merged[-1].last, each.last))
        else:
            merged.append(each)
    return tuple(merged)
