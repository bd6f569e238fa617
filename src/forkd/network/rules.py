"""The packet filter as text for nft(8); pure.

One table holds the walls of all sandboxes.  Its chains never change: what a sandbox may do is in
sets and maps whose keys begin with its tap, so that a thousand sandboxes cost a packet no more
than one.

    from_guests  every packet of a tap, before it is routed or led elsewhere: allowed, or refused at
                 once; dropped, if the tap has no wall yet.  No policy allows this host's own
                 addresses or other sandboxes, but for the host's end of the tap's own link
    input        what of it is for this host: the resolver, and the host's end if that is allowed
    forward      to a tap go answers only, and nothing from another tap; strangers' packets go
                 nowhere, where this host forwards because of us, but for those from taps of other
                 daemons that the walls there have allowed, and so marked.  Both ends of a TCP
                 connection are told the longest segment that the route takes, since many networks
                 drop the errors that say so
    from_host    what this host answers a tap, or sends on for the proxy: to what the tap may ask
    dns          questions to the host's end of a link go to our resolver's port, and connections
                 to the ports of a sandbox's secrets, once they were allowed, to our proxy's
    out          what leaves the host has the host's address
    to_guests    every packet to a tap, of whoever: what is over a sandbox's bandwidth is dropped,
                 as `guest` drops it of what comes from one

A connection that was allowed bears a mark of the policy that allowed it, and goes on for as long
as the sandbox has that policy, also if the address of a name has timed out since.  Under another
policy each packet of it, from either end, is decided on again; under that of another sandbox it is
refused, and dropped if it comes in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING

from forkd.limits import (
    NETWORK_CONNECTIONS_MAX,
    RESOLVER_QUESTIONS_BURST_MAX,
    RESOLVER_QUESTIONS_PER_S_MAX,
)
from forkd.model.caller import DEFAULT_TENANT
from forkd.model.network import Protocol
from forkd.network.ranges import MAPPED, SPECIAL_V4, SPECIAL_V6, pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from forkd.model.caller import Tenant
    from forkd.model.network import NameRule, NetworkPolicy
    from forkd.model.secret import SecretUse
    from forkd.network.plan import Plan, Slot
    from forkd.network.ranges import Address, Piece

NOTED_S = 3_600
"""How long a refused destination is listed."""

BURST_BYTES_MIN = 256 << 10
"""What may go over a limited network at once, at least: the largest packets, which the kernel cuts
later, are 64 KiB, and one that is larger than this would never pass."""

BURST_SHARE = 10
"""Of what goes in a second: what may go at once, if that is more."""

_WAYS = ("up", "down")
_BYTES_PER_MBIT = 125_000

_TABLE = """
table inet {table} {{
  set taps {{ type ifname; }}
  set held {{ type ifname; }}
  set internet {{ type ifname; }}
  set host {{ type ifname; }}
  set roused {{ type ifname; }}
  set learning {{ type ifname; }}
  set woken {{ type nf_proto; }}
  set led {{ type ifname . inet_service; }}
  map ids {{ type ifname : mark; }}
  map marks {{ type ifname : mark; }}
  set current {{ type ifname . mark; }}
  set former {{ type ifname . mark; }}
  map up {{ type ifname : limit; }}
  map down {{ type ifname : limit; }}
  set connections {{ type ifname; flags dynamic; size 65536; }}
  set asking {{ type ifname; flags dynamic; size 65536; }}
  set refusals {{ type mark; flags dynamic; size 65536; counter; }}
  set noting {{ type mark; flags dynamic,timeout; timeout {noted_s}s; size 65536; }}
{sets}
  chain from_guests {{
    type filter hook prerouting priority mangle; policy accept;
    iifname @taps jump guest
  }}
  chain guest {{
    icmpv6 type nd-neighbor-solicit ip6 hoplimit 255 jump neighbour
    limit name iifname map @up drop
    meta nfproto ipv4 iifname . ip saddr != @guests4 drop
    meta nfproto ipv6 iifname . ip6 saddr != @guests6 drop
    meta pkttype != host drop
    ct state invalid drop
    ct state established,related ct direction reply iifname . ct original ip daddr @guests4 accept
    ct state established,related ct direction reply iifname . ct original ip6 daddr @guests6 accept
    ct state related iifname . ct original ip saddr != @guests4 drop
    ct state related iifname . ct original ip6 saddr != @guests6 drop
    iifname . ip daddr @gateways4 meta l4proto {{ tcp, udp }} th dport 53 goto ask
    iifname . ip6 daddr @gateways6 meta l4proto {{ tcp, udp }} th dport 53 goto ask
    iifname @held goto refuse
    ct state established,related iifname . ct mark @current accept
    iifname @host iifname . ip daddr @gateways4 goto allow
    iifname @host iifname . ip6 daddr @gateways6 goto allow
    fib daddr type {{ local, broadcast, anycast, multicast }} goto refuse
    ip daddr {pool4} goto refuse
    ip6 daddr {{ {pool6}, {mapped} }} goto refuse
{allowed}
    goto refuse
  }}
  chain ask {{
    meta l4proto udp update @asking {{ \
iifname limit rate over {questions_per_s}/second burst {questions_burst} packets }} drop
    ct state new add @connections {{ iifname ct count over {connections} }} goto refuse
    ct mark set {asked}
    accept
  }}
  chain neighbour {{
    iifname . ip6 saddr != @guests6 return
    ip6 daddr ff02::1:ff00:0/104 accept
    iifname . ip6 daddr @gateways6 accept
  }}
  chain allow {{
    ct state new add @connections {{ iifname ct count over {connections} }} goto refuse
    ct mark set iifname map @marks
    accept
  }}
  chain refuse {{
    meta mark set iifname map @ids
    update @refusals {{ meta mark }}
    update @noting {{ meta mark limit rate 10/minute burst 64 packets }} jump note
    meta l4proto tcp reject with tcp reset
    reject with icmpx admin-prohibited
  }}
  chain note {{
{noted}
  }}
  chain input {{
    type filter hook input priority filter; policy accept;
    iifname @taps jump to_host
    iifname != @taps meta l4proto {{ tcp, udp }} th dport {port} drop
{proxy_is_ours}
  }}
  chain to_host {{
    icmpv6 type nd-neighbor-solicit accept
    ct state established,related ct direction reply iifname . ct original ip daddr @guests4 accept
    ct state established,related ct direction reply iifname . ct original ip6 daddr @guests6 accept
    iifname . ip daddr @gateways4 meta l4proto {{ tcp, udp }} th dport {port} accept
    iifname . ip6 daddr @gateways6 meta l4proto {{ tcp, udp }} th dport {port} accept
{proxy_takes}
    iifname @host iifname . ip daddr @gateways4 accept
    iifname @host iifname . ip6 daddr @gateways6 accept
    goto refuse
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    tcp flags & (syn | rst) == syn iifname @taps tcp option maxseg size set rt mtu
    tcp flags & (syn | rst) == syn oifname @taps tcp option maxseg size set rt mtu
    oifname @taps jump to_guest
    iifname @taps accept
    iifname "fk*" ct mark != 0 accept
    ct state != new accept
    ct status dnat accept
    meta nfproto ipv4 iifname @roused drop
    meta nfproto @woken drop
  }}
  chain to_guest {{
    iifname @taps goto refuse
    oifname @held drop
    ct state established,related oifname . ct mark @current accept
    ct state established oifname . ct mark @former goto answer
    drop
  }}
  chain from_host {{
    type filter hook output priority filter; policy accept;
    oifname @taps ct state established ct direction reply ct mark != {asked} goto of_host
  }}
  chain of_host {{
    tcp flags rst accept
    oifname @held drop
    oifname . ct mark @current accept
    oifname . ct mark != @former drop
    oifname @host oifname . ct original ip daddr @gateways4 goto renew
    oifname @host oifname . ct original ip6 daddr @gateways6 goto renew
    drop
  }}
  chain answer {{
{answered}
    drop
  }}
  chain renew {{
    ct mark set oifname map @marks
    accept
  }}
  chain dns {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname . ip daddr @gateways4 meta l4proto {{ tcp, udp }} th dport 53 redirect to :{port}
    iifname . ip6 daddr @gateways6 meta l4proto {{ tcp, udp }} th dport 53 redirect to :{port}
{proxy_leads}
  }}
  chain to_guests {{
    type filter hook postrouting priority mangle; policy accept;
    oifname @taps limit name oifname map @down drop
  }}
  chain out {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {pool4} oifname != @taps masquerade
    ip6 saddr {pool6} oifname != @taps masquerade
  }}
}}
"""

_SETS = """
  set guests{v} {{ type ifname . {ip}_addr; }}
  set gateways{v} {{ type ifname . {ip}_addr; }}
  set special{v} {{ type {ip}_addr; flags interval; elements = {{ {special} }}; }}
  set allowed{v} {{ type ifname . {ip}_addr . inet_proto . inet_service; flags interval; }}
  set pinged{v} {{ type ifname . {ip}_addr; flags interval; }}
  set named{v} {{ type ifname . {ip}_addr . inet_proto . inet_service; flags timeout; }}
  set named_all{v} {{ type ifname . {ip}_addr . inet_proto; flags timeout; }}
  set refused{v} {{
    type mark . {ip}_addr . inet_proto . inet_service
    flags dynamic,timeout; timeout {noted_s}s; size 65536; counter;
  }}"""

# A set with intervals is asked by the header's own protocol: for `meta l4proto` in one, libnftables
# 1.0.6 swaps two bytes of one, which kernels refuse (seen with 6.12.118).  So a packet of IPv6 with
# an extension header is in no such set, and is refused.
_ALLOWED = """
    {link} . {address} . {protocol} . {port} @allowed{v} goto {then}
    {link} . {address} . meta l4proto . {port} @named{v} goto {then}
    {link} . {address} . meta l4proto @named_all{v} goto {then}
    meta l4proto {icmp} {link} . {address} @pinged{v} goto {then}
    {link} @internet {address} != @special{v} goto {then}"""

_ASKED_FOR = {"link": "iifname", "address": "{ip} daddr", "port": "th dport", "then": "allow"}
"""How a packet from a tap says what `_ALLOWED` decides on."""

_ANSWERED = {"link": "oifname", "address": "{ip} saddr", "port": "th sport", "then": "renew"}
"""How an answer to a tap does."""

_NOTED = """
    meta l4proto {{ tcp, udp }} update @refused{v} {{ \
meta mark . {ip} daddr . meta l4proto . th dport }}
    meta l4proto {icmp} update @refused{v} {{ meta mark . {ip} daddr . meta l4proto . 0 }}"""


_PROXY = {
    "proxy_is_ours": """
    iifname != @taps tcp dport {port} drop""",
    "proxy_takes": """
    tcp dport {port} ct status dnat accept
    tcp dport {port} goto refuse""",
    "proxy_leads": """
    iifname . tcp dport @led iifname . ip daddr != @gateways4 redirect to :{port}
    iifname . tcp dport @led iifname . ip6 daddr != @gateways6 redirect to :{port}""",
}


@dataclass(frozen=True, slots=True)
class Wall:
    """What stands around one sandbox.

    Attributes:
        lease: Of which lease, whose id no other ever has.
        slot: Its link.
        policy: What it may reach.
        held: Whether it may reach nothing at the moment.
        bandwidth_mbit: How much goes each way, in millions of bits a second; None for no limit.
        use: Which secrets it uses; None for none.
        led: To which ports its connections are led to the egress proxy.
        former: Marks of policies that it had before, of which connections may be open.
        tenant: Whose sandbox it is.
    """

    lease: str
    slot: Slot
    policy: NetworkPolicy
    held: bool = False
    bandwidth_mbit: int | None = None
    use: SecretUse | None = None
    led: frozenset[int] = frozenset()
    former: tuple[int, ...] = ()
    tenant: Tenant = DEFAULT_TENANT

    @property
    def id(self) -> int:
        """The mark under which its refusals are noted."""
        return _mark(self.lease)

    @property
    def mark(self) -> int:
        """The mark of connections that this policy allowed."""
        return _mark(f"{self.lease} {self.policy.rules()}")


@dataclass(frozen=True, slots=True)
class Opening:
    """An address that a name resolved to, for a sandbox.

    Attributes:
        tap: Whose.
        address: Which.
        protocol: What is allowed there.
        port: Where; None for every port, and for ICMP.
        name: Which name; an address that several lead to is open by the first.
    """

    tap: str
    address: Address
    protocol: Protocol
    port: int | None
    name: str = field(default="", compare=False)

    def is_allowed(self, policy: NetworkPolicy) -> bool:
        """Whether a policy allows it, if its name leads there."""
        return any(
            self.protocol in rule.protocols
            and (self.port is None if not rule.ports else self.port in _singles(rule))
            for rule in policy.named(self.name)
        )


def _singles(rule: NameRule) -> set[int]:
    return {each.first for each in rule.ports}


def table_name(plan: Plan) -> str:
    """Return the name of a daemon's table: as its taps, so that no two have the same."""
    return "forkd" if plan.tap_prefix == "fk" else f"forkd_{plan.tap_prefix}"


def asked_mark(plan: Plan) -> int:
    """Return the mark of connections to the resolver of a daemon."""
    return _mark(f"resolver of {table_name(plan)}")


def build(plan: Plan, port: int, proxy_port: int = 0) -> str:
    """Return the commands that make the table, in place of one that may be there.

    Args:
        plan: Which taps and addresses there may be.
        port: Where our resolver listens.
        proxy_port: Where our egress proxy listens; 0 if there is none.
    """
    proxy = {
        name: text.format(port=proxy_port) if proxy_port else "" for name, text in _PROXY.items()
    }
    families = (
        {
            "v": 4, "ip": "ip", "icmp": "icmp", "special": SPECIAL_V4, "type": "ipv4",
            "protocol": "ip protocol",
        },
        {
            "v": 6, "ip": "ip6", "icmp": "icmpv6", "special": SPECIAL_V6, "type": "ipv6",
            "protocol": "ip6 nexthdr",
        },
    )  # fmt: skip
    sets, allowed, answered, noted = "", "", "", ""
    for family in families:
        special = ", ".join(map(str, family["special"]))  # type: ignore[call-overload]  # networks
        names = {**family, "special": special, "noted_s": NOTED_S}
        sets += _SETS.format(**{**names, "ip": family["type"]})
        allowed += _decisions(names, _ASKED_FOR)
        answered += _decisions(names, _ANSWERED)
        noted += _NOTED.format(**names)
    return remove(plan) + _TABLE.format(
        table=table_name(plan),
        sets=sets,
        allowed=allowed,
        answered=answered,
        noted=noted,
        port=port,
        asked=f"{asked_mark(plan):#010x}",
        noted_s=NOTED_S,
        connections=NETWORK_CONNECTIONS_MAX,
        questions_per_s=RESOLVER_QUESTIONS_PER_S_MAX,
        questions_burst=RESOLVER_QUESTIONS_BURST_MAX,
        pool4=plan.pool,
        pool6=plan.pool_v6,
        mapped=MAPPED,
        **proxy,
    )


def _decisions(family: Mapping[str, object], said: Mapping[str, str]) -> str:
    """Return the rules that allow packets of a family, which say by `said` what they are for."""
    return _ALLOWED.format(**family, **{key: text.format(**family) for key, text in said.items()})


def remove(plan: Plan) -> str:
    """Return the commands that remove the table, whether it is there or not."""
    return f"add table inet {table_name(plan)}\ndelete table inet {table_name(plan)}\n"


def put(plan: Plan, walls: Iterable[Wall]) -> str:
    """Return the commands that put up walls around taps that have none."""
    walls = list(walls)
    elements = _elements(plan, "add", (each for wall in walls for each in _of(wall)))
    return _bandwidths(plan, "add", walls) + elements


def guard(plan: Plan, taps: Iterable[str]) -> str:
    """Return the commands that drop what comes from taps that have no wall, or is forwarded there.

    They are taps, without any address that packets from there may have.
    """
    return _elements(plan, "add", [("taps", _quoted(tap)) for tap in taps])


def unguard(plan: Plan, taps: Iterable[str]) -> str:
    """Return the commands that undo `guard`, for taps that are gone."""
    return _elements(plan, "delete", [("taps", _quoted(tap)) for tap in taps])


def take(plan: Plan, walls: Iterable[Wall], openings: Iterable[Opening] = ()) -> str:
    """Return the commands that take walls away, and openings with them.

    An opening may have timed out, and is added first: a command that deletes nothing fails, and
    all others with it.
    """
    walls = list(walls)
    gone = [each for wall in walls for each in _of(wall)]
    timed = [_of_opening(opening) for opening in openings]
    return (
        _elements(plan, "add", timed)
        + _elements(plan, "delete", timed)
        + _elements(plan, "delete", gone)
        + _bandwidths(plan, "delete", walls)
    )


def limit(plan: Plan, before: Wall, after: Wall) -> str:
    """Return the commands that give a wall the bandwidth of another, which is all that differs."""
    return (
        _elements(plan, "delete", _limited(before))
        + _bandwidths(plan, "delete", [before])
        + _bandwidths(plan, "add", [after])
        + _elements(plan, "add", _limited(after))
    )


def open_for(plan: Plan, openings: Iterable[Opening], seconds: int) -> str:
    """Return the commands that open addresses for a time, from now on."""
    keys = [_of_opening(opening) for opening in openings]
    timed = [(name, f"{key} timeout {seconds}s") for name, key in keys]
    # The kernel leaves the time of an element as it is if that is added once more.
    return (
        _elements(plan, "add", timed)
        + _elements(plan, "delete", keys)
        + _elements(plan, "add", timed)
    )


def forget(plan: Plan, walls: Iterable[Wall]) -> str:
    """Return the commands that forget how much sandboxes were refused."""
    gone = [("refusals", f"{wall.id:#010x}") for wall in walls]
    return _elements(plan, "add", gone) + _elements(plan, "delete", gone)


ROUSED_SETS = ("roused", "learning", "woken")
"""The sets in which it is noted what forwards because of us: of links, of links, of a family."""


@dataclass(frozen=True, slots=True)
class Roused:
    """What of the host forwards because of us, to be put back with the last wall.

    Attributes:
        links: Which links forward IPv4.
        ipv6: Whether the host forwards IPv6.
        learning: Which links were told to learn routers all the same.
    """

    links: tuple[str, ...] = ()
    ipv6: bool = False
    learning: tuple[str, ...] = ()


def rouse(plan: Plan, roused: Roused) -> str:
    """Return the commands that note what forwards because of us."""
    noted = [("roused", _quoted(link)) for link in roused.links]
    noted += [("learning", _quoted(link)) for link in roused.learning]
    noted += [("woken", "ipv6")] if roused.ipv6 else []
    return _elements(plan, "add", noted)


def rest(plan: Plan) -> str:
    """Return the commands that note that nothing forwards because of us."""
    return "".join(f"flush set inet {table_name(plan)} {name}\n" for name in ROUSED_SETS)


def _of(wall: Wall) -> Iterator[tuple[str, str]]:
    """Yield what a wall consists of: the name of a set, and an element of it."""
    slot, policy, tap = wall.slot, wall.policy, _quoted(wall.slot.tap)
    yield "ids", f"{tap} : {wall.id:#010x}"
    yield "marks", f"{tap} : {wall.mark:#010x}"
    yield "current", f"{tap} . {wall.mark:#010x}"
    for mark in wall.former:
        yield "former", f"{tap} . {mark:#010x}"
    yield "guests4", f"{tap} . {slot.guest}"
    yield "gateways4", f"{tap} . {slot.host}"
    if slot.ipv6:
        yield "guests6", f"{tap} . {slot.guest_v6}"
        yield "gateways6", f"{tap} . {slot.host_v6}"
    yield from _limited(wall)
    for name, given in (
        ("taps", True),
        ("held", wall.held),
        ("internet", policy.internet),
        ("host", policy.host),
    ):
        if given:
            yield name, tap
    for port in sorted(wall.led):
        yield "led", f"{tap} . {port}"
    for piece in pieces(policy.addresses):
        yield _of_piece(tap, piece)


def _limited(wall: Wall) -> Iterator[tuple[str, str]]:
    if wall.bandwidth_mbit is not None:
        for way in _WAYS:
            yield way, f'{_quoted(wall.slot.tap)} : "{wall.slot.tap}_{way}"'


def _bandwidths(plan: Plan, verb: str, walls: Iterable[Wall]) -> str:
    """Return the commands that add or delete what counts the bytes of walls, one for each way."""
    commands = []
    for wall in walls:
        if wall.bandwidth_mbit is None:
            continue
        rate = wall.bandwidth_mbit * _BYTES_PER_MBIT
        burst = max(BURST_BYTES_MIN, rate // BURST_SHARE)
        what = f" {{ rate over {rate} bytes/second burst {burst} bytes; }}" if verb == "add" else ""
        commands += [
            f"{verb} limit inet {table_name(plan)} {wall.slot.tap}_{way}{what}\n" for way in _WAYS
        ]
    return "".join(commands)


def _of_piece(tap: str, piece: Piece) -> tuple[str, str]:
    kind = IPv4Address if piece.version == 4 else IPv6Address  # noqa: PLR2004 - IPv4
    first, last = kind(piece.span.first), kind(piece.span.last)
    where = str(first) if first == last else f"{first}-{last}"
    if piece.ports is None:
        return f"pinged{piece.version}", f"{tap} . {where}"
    key = f"{tap} . {where} . {piece.protocol} . {piece.ports}"
    return f"allowed{piece.version}", key


def _of_opening(opening: Opening) -> tuple[str, str]:
    version, protocol = opening.address.version, str(opening.protocol)
    if opening.protocol is Protocol.ICMP and version == 6:  # noqa: PLR2004 - IPv6
        protocol = "icmpv6"
    key = f"{_quoted(opening.tap)} . {opening.address} . {protocol}"
    if opening.port is None:
        return f"named_all{version}", key
    return f"named{version}", f"{key} . {opening.port}"


def _elements(plan: Plan, verb: str, elements: Iterable[tuple[str, str]]) -> str:
    """Return one command for each set, as few as there can be."""
    by_set: dict[str, list[str]] = {}
    for name, element in elements:
        by_set.setdefault(name, []).append(element)
    table = table_name(plan)
    return "".join(
        f"{verb} element inet {table} {name} {{ {', '.join(keys)} }}\n"
        for name, keys in by_set.items()
    )


def _quoted(link: str) -> str:
    return f'"{link}"'


def _mark(of: str) -> int:
    return int.from_bytes(blake2b(of.encode(), digest_size=4).digest()) or 1
