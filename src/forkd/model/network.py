"""What a sandbox may reach: a policy, parsed from rules that a person can write.

    host                    the host's end of the sandbox's own link
    internet                every public address, every public name
    10.1.0.0/16:5432/tcp    addresses, with ports (`80,443`, `8000-8999`) and a protocol
    [2001:db8::]/32:443     IPv6 has brackets where ports follow
    example.com:443            a name, with single ports
    *.debian.org            every name below a name, not the name itself

Without ports a rule allows all of TCP, UDP and ICMP; with ports, TCP and UDP; a protocol narrows
both.  A policy is a set of rules, and everything that no rule allows is refused.  No network at
all is `None`, not an empty policy: the sandbox has no interface then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TypeAlias

from forkd.errors import InvalidRequest
from forkd.limits import NETWORK_NAMES_MAX, NETWORK_PORTS_MAX, NETWORK_RULES_MAX

IpNetwork: TypeAlias = IPv4Network | IPv6Network

NONE, INTERNET, HOST_END, DENY_ALL = "none", "internet", "host", "deny-all"
"""The words of a policy; `none` and `deny-all` stand alone."""

PORT_MAX = 65_535

NAME_CHARS_MAX = 253
"""Longest name in DNS (RFC 1035, section 2.3.4)."""

RULE_CHARS_MAX = 512
"""Longest rule."""

_EVERYWHERE = IPv4Network("0.0.0.0/0")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_PORT = re.compile(r"[0-9]{1,5}")


class Protocol(StrEnum):
    """What a rule may allow of an address."""

    TCP = "tcp"
    UDP = "udp"
    ICMP = "icmp"


@dataclass(frozen=True, slots=True, order=True)
class Ports:
    """A range of ports, both ends included."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


ALL_PORTS = (Ports(0, PORT_MAX),)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What rules have in common.

    Attributes:
        ports: Which ports; none for all.
        protocol: The only protocol; None for all that have ports, or, without ports, for all.
    """

    ports: tuple[Ports, ...] = ()
    protocol: Protocol | None = None

    @property
    def protocols(self) -> tuple[Protocol, ...]:
        """What is allowed."""
        if self.protocol is not None:
            return (self.protocol,)
        return (Protocol.TCP, Protocol.UDP) if self.ports else tuple(Protocol)

    def _tail(self) -> str:
        ports = ",".join(map(str, self.ports))
        return (f":{ports}" if ports else "") + (f"/{self.protocol}" if self.protocol else "")


@dataclass(frozen=True, slots=True)
class AddressRule(_Rule):
    """Allows addresses."""

    network: IpNetwork = _EVERYWHERE

    def __str__(self) -> str:
        shown = str(self.network)
        if self.network.prefixlen == self.network.max_prefixlen:
            shown = str(self.network.network_address)
        if self.network.version == 6:  # noqa: PLR2004 - IPv6
            shown = f"[{shown}]"
        return shown + self._tail()


@dataclass(frozen=True, slots=True)
class NameRule(_Rule):
    """Allows the addresses that a name resolves to, or those of all names below it.

    Attributes:
        name: In lower case, without the dot at its end.
        below: Whether the names below it are meant, and not itself.
    """

    name: str = ""
    below: bool = False

    def __str__(self) -> str:
        return ("*." if self.below else "") + self.name + self._tail()

    def matches(self, name: str) -> bool:
        """Whether a name, in lower case and without the dot at its end, is allowed."""
        return name.endswith(f".{self.name}") if self.below else name == self.name


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """What a sandbox with an interface may reach.

    Attributes:
        internet: Whether every public address.
        host: Whether the host's end of its link, and so what listens there.
        addresses: Which addresses beside.
        names: Which names beside.
    """

    internet: bool = False
    host: bool = False
    addresses: tuple[AddressRule, ...] = ()
    names: tuple[NameRule, ...] = field(default=())

    @property
    def forwards(self) -> bool:
        """Whether it allows anything beyond the host."""
        return self.internet or bool(self.addresses) or bool(self.names)

    @property
    def forwards_ipv6(self) -> bool:
        """Whether it allows anything beyond the host that may have an IPv6 address."""
        by_address = any(rule.network.version == 6 for rule in self.addresses)  # noqa: PLR2004 - IPv6
        return self.internet or by_address or bool(self.names)

    def rules(self) -> tuple[str, ...]:
        """Return it as text, one rule each, so that parsing gives the same policy."""
        words = ([INTERNET] if self.internet else []) + ([HOST_END] if self.host else [])
        return (*words, *map(str, self.addresses), *map(str, self.names))

    def named(self, name: str) -> tuple[NameRule, ...]:
        """Return the rules that allow a name, in lower case and without the dot at its end."""
        return tuple(rule for rule in self.names if rule.matches(name))

    def with_rules(self, rules: tuple[str, ...]) -> NetworkPolicy:
        """Return a policy that allows `rules` beside what this one does.

        Raises:
            InvalidRequest: One is malformed, or they are too many; the field is `network`.
        """
        return _parse((*self.rules(), *rules))


@dataclass(frozen=True, slots=True)
class RefusedDestination:
    """Where a sandbox wanted to within the last hour, and was refused.

    Attributes:
        address: To which address.
        protocol: By which protocol, as the kernel calls it.
        port: To which port; None if the protocol has none.
        packets: How often it was noted: a sandbox that tries many places has not each one noted.
    """

    address: str
    protocol: str
    port: int | None
    packets: int


@dataclass(frozen=True, slots=True)
class RefusedName:
    """A name that a sandbox asked for and did not get.

    Attributes:
        name: Which.
        why: Why not.
        questions: How often it asked.
    """

    name: str
    why: str
    questions: int


@dataclass(frozen=True, slots=True)
class NetworkStatus:
    """What a sandbox may reach, and what it was refused.

    Attributes:
        policy: What it may reach.
        held: Whether it may reach nothing at the moment.
        address: Its own address.
        gateway: The host's end of its link, where the resolver answers.
        address_v6: Its own IPv6 address; None without.
        gateway_v6: The host's end of its link in IPv6; None without.
        refused_packets: How many packets were refused.
        refused_destinations: Where they went to, the most asked for first.
        refused_questions: How many questions for names were refused.
        refused_names: For which names, the most asked for first.
    """

    policy: NetworkPolicy
    held: bool
    address: str
    gateway: str
    address_v6: str | None = None
    gateway_v6: str | None = None
    refused_packets: int = 0
    refused_destinations: tuple[RefusedDestination, ...] = ()
    refused_questions: int = 0
    refused_names: tuple[RefusedName, ...] = ()


@dataclass(frozen=True, slots=True)
class NetworkChange:
    """How a running sandbox's network changes; what is None stays as it is.

    Attributes:
        policy: What it may reach, in place of what it might.
        allow: What it may reach beside that.
        hold: Whether it may reach nothing at the moment.
    """

    policy: NetworkPolicy | None = None
    allow: tuple[str, ...] = ()
    hold: bool | None = None

    def of(self, before: NetworkPolicy) -> NetworkPolicy:
        """Return the policy that it makes of another.

        Raises:
            InvalidRequest: A rule is malformed, or they are too many.
        """
        return (self.policy or before).with_rules(self.allow)


HOST = NetworkPolicy(host=True)
"""What `network: true` means: the host's end of the link, and nothing beyond it."""


def parse_change(
    network: bool | str | list[str] | None,  # noqa: FBT001 - what clients send
    allow: list[str],
    *,
    hold: bool | None,
) -> NetworkChange:
    """Return the change that a client asked for.

    Raises:
        InvalidRequest: It is malformed; a network cannot be taken away, only closed.
    """
    policy = None if network is None else parse_policy(network)
    if network is not None and policy is None:
        raise _refused(f"a running sandbox keeps its link; {DENY_ALL} closes it")
    for word in (NONE, DENY_ALL):
        if word in allow:
            raise _refused(f"{word} allows nothing; give it as the policy")
    return NetworkChange(policy, tuple(allow), hold)


def parse_policy(given: bool | str | list[str] | tuple[str, ...]) -> NetworkPolicy | None:  # noqa: FBT001 - what clients send
    """Return the policy that a client asked for; None for no network.

    Args:
        given: `True` for `host`, `False` for `none`, one rule, or several.

    Raises:
        InvalidRequest: It is malformed, contradicts itself or is too long; the field is `network`.
    """
    if isinstance(given, bool):
        return HOST if given else None
    rules = [given] if isinstance(given, str) else list(given)
    for word in (NONE, DENY_ALL):
        if word in rules and len(rules) > 1:
            raise _refused(f"{word} contradicts the other rules; give it alone")
    if rules == [NONE]:
        return None
    return _parse(() if rules == [DENY_ALL] else tuple(rules))


def parse_name_rule(text: str, port_default: int, field: str) -> NameRule:
    """Return a rule for a name, over TCP, with single ports.

    Args:
        text: Such as `example.com`, `*.example.com:8443`.
        port_default: Which port is meant if none is named.
        field: What the client calls it.

    Raises:
        InvalidRequest: It is none; the field is `field`.
    """
    try:
        rule = _rule(text)
    except InvalidRequest as error:
        reason = str(error).removeprefix("network: ")
        raise InvalidRequest(f"{field}: {reason}", field=field) from None
    if not isinstance(rule, NameRule):
        raise InvalidRequest(f"{field}: {text} is an address; give a name", field=field)
    if rule.protocol is not None:
        raise InvalidRequest(f"{field}: {text}: leave the protocol out", field=field)
    return rule if rule.ports else replace(rule, ports=(Ports(port_default, port_default),))


def _parse(rules: tuple[str, ...]) -> NetworkPolicy:
    rules = tuple(dict.fromkeys(rules))
    if len(rules) > NETWORK_RULES_MAX:
        raise _refused(f"a policy has at most {NETWORK_RULES_MAX} rules, not {len(rules)}")
    words = {rule for rule in rules if rule in (INTERNET, HOST_END)}
    parsed = [_rule(rule) for rule in rules if rule not in words]
    names = tuple(dict.fromkeys(rule for rule in parsed if isinstance(rule, NameRule)))
    if len(names) > NETWORK_NAMES_MAX:
        raise _refused(f"a policy has at most {NETWORK_NAMES_MAX} names, not {len(names)}")
    return NetworkPolicy(
        internet=INTERNET in words,
        host=HOST_END in words,
        addresses=tuple(dict.fromkeys(rule for rule in parsed if isinstance(rule, AddressRule))),
        names=names,
    )


def _rule(text: str) -> AddressRule | NameRule:
    if len(text) > RULE_CHARS_MAX:
        raise _refused(f"a rule has at most {RULE_CHARS_MAX} characters: {text[:40]}…")
    target, ports, protocol = _split(text)
    if protocol is Protocol.ICMP and ports:
        raise _refused(f"{text}: ICMP has no ports")
    network = _network(target, text)
    if network is not None:
        return AddressRule(ports, protocol, network)
    if any(each.first != each.last for each in ports):
        raise _refused(f"{text}: a name takes single ports, such as 80,443")
    below = target.startswith("*.")
    return NameRule(ports, protocol, _name(target.removeprefix("*."), text), below)


def _split(text: str) -> tuple[str, tuple[Ports, ...], Protocol | None]:
    """Cut a rule into its target, its ports and its protocol."""
    rest, protocol = text.strip(), None
    head, slash, tail = rest.rpartition("/")
    if slash and tail.isalpha():
        if tail not in tuple(Protocol):
            raise _refused(f"{text}: the protocol is tcp, udp or icmp, not {tail}")
        rest, protocol = head, Protocol(tail)
    head, colon, tail = rest.rpartition(":")
    if not colon or (":" in head and not head.startswith("[")) or "]" in tail:
        return rest, (), protocol  # IPv6 without brackets has colons of its own
    return head, _ports(tail, text), protocol


def _ports(given: str, text: str) -> tuple[Ports, ...]:
    ranges = given.split(",")
    if len(ranges) > NETWORK_PORTS_MAX:
        raise _refused(f"{text[:40]}…: at most {NETWORK_PORTS_MAX} ports or ranges in a rule")
    found = []
    for each in ranges:
        first, dash, last = each.partition("-")
        ends = (first, last if dash else first)
        if not all(_PORT.fullmatch(end) for end in ends):
            raise _refused(f"{text}: ports are such as 443, 80,443 or 8000-8999, not {each!r}")
        ports = Ports(int(ends[0]), int(ends[1]))
        if not 1 <= ports.first <= ports.last <= PORT_MAX:
            raise _refused(f"{text}: ports are 1 to {PORT_MAX}, the lower one first")
        found.append(ports)
    return tuple(sorted(set(found)))


def _network(target: str, text: str) -> IpNetwork | None:
    """Return the addresses that a rule is for; None if it is for a name."""
    bare = target
    if target.startswith("["):
        inner, bracket, length = target[1:].partition("]")
        if not bracket or ":" not in inner:
            raise _refused(f"{text}: brackets go around an IPv6 address")
        bare = inner + length
    if not (":" in bare or "/" in bare or re.fullmatch(r"[0-9.]+", bare)):
        return None
    try:
        return ip_network(bare)
    except ValueError as error:
        raise _refused(f"{text}: {error}") from None


def _name(name: str, text: str) -> str:
    name = name.lower().removesuffix(".")
    if not name.isascii():
        raise _refused(f"{text}: write the name as DNS has it (xn--…)")
    labels = name.split(".")
    if len(name) > NAME_CHARS_MAX or not all(_LABEL.fullmatch(label) for label in labels):
        words = f"{NONE}, {DENY_ALL}, {INTERNET}, {HOST_END}"
        raise _refused(f"{text!r} is no address, no name and none of {words}")
    if len(labels) == 1 and not text.startswith("*."):
        raise _refused(f"{text}: a name has a dot, such as example.com")
    return name


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(f"network: {message}", field="network")
