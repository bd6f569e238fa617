"""Which names a sandbox may resolve, and to what; pure.

An answer holds addresses only that the sandbox may reach: a public name that resolves to a private
address would lead it to where no policy meant to (rebinding), so that address is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address
from typing import TYPE_CHECKING

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset
from dns.exception import DNSException

from forkd.limits import REFUSED_NAMES_MAX
from forkd.network.ranges import allows, is_public
from forkd.network.rules import Opening

if TYPE_CHECKING:
    from forkd.model.caller import Tenant
    from forkd.model.network import NetworkPolicy
    from forkd.network.ranges import Address

CHAIN_MAX = 8
"""Longest chain of aliases (CNAME) that is followed."""

ADDRESSES_MAX = 64
"""Most addresses of one answer that are passed on."""

OPEN_S_MIN, OPEN_S_MAX = 60, 3_600
"""How long an address is open to new connections after its name was resolved: the answer's time to
live, within these."""

ABSENT_S_MAX = 60
"""How long it is kept at most that a name, or an address of it, does not exist."""

ANSWER_BYTES_MIN, ANSWER_BYTES_MAX = 512, 1_232
"""Size of an answer over UDP: what each asker takes, and what no link fragments."""

_ADDRESSES = (dns.rdatatype.A, dns.rdatatype.AAAA)


class Why(StrEnum):
    """Why a question was refused."""

    NOT_ALLOWED = "not allowed"
    PRIVATE = "resolves to addresses that are not public"
    HELD = "held until the sandbox is promoted"


@dataclass(slots=True)
class RefusedNames:
    """The names that one sandbox asked for and did not get, and how often."""

    counts: dict[tuple[str, Why], int] = field(default_factory=dict)
    total: int = 0

    def note(self, name: str, why: Why) -> None:
        """Count a refusal; when there are too many names, those after are counted only in sum."""
        self.total += 1
        key = (name, why)
        if key in self.counts or len(self.counts) < REFUSED_NAMES_MAX:
            self.counts[key] = self.counts.get(key, 0) + 1


@dataclass(frozen=True, slots=True)
class Asker:
    """A sandbox that asks.

    Attributes:
        lease: Its lease: the next sandbox with this link has another.
        tap: Its link.
        tenant: Whose it is.
        mark: Of its wall: another policy has another.
        policy: What it may reach.
        held: Whether it may reach nothing at the moment.
        refused: Where its refusals are counted.
    """

    lease: str
    tap: str
    tenant: Tenant
    mark: int
    policy: NetworkPolicy
    held: bool
    refused: RefusedNames


def parse(wire: bytes) -> dns.message.QueryMessage | None:
    """Return the question in a message; None if it is none, or not one."""
    try:
        message = dns.message.from_wire(wire, one_rr_per_rrset=False)
    except (DNSException, ValueError):
        return None
    if not isinstance(message, dns.message.QueryMessage) or message.flags & dns.flags.QR:
        return None
    return message if len(message.question) == 1 else None


def name_of(query: dns.message.QueryMessage) -> str:
    """Return the name that is asked for, in lower case and without the dot at its end."""
    return query.question[0].name.to_text(omit_final_dot=True).lower()


def refusal(query: dns.message.QueryMessage, asker: Asker) -> Why | None:
    """Return why a question is not even asked upstream; None if it is."""
    if asker.held:
        return Why.HELD
    if asker.policy.internet or asker.policy.named(name_of(query)):
        return None
    return Why.NOT_ALLOWED


def refuse(query: dns.message.QueryMessage, why: Why) -> dns.message.Message:
    """Return the answer to a question that is refused: there is no such name, and why.

    Another code would have the asker try again, and a program wait for that.
    """
    answer = dns.message.make_response(query, recursion_available=True)
    answer.set_rcode(dns.rcode.NXDOMAIN)
    if query.edns >= 0:
        code = dns.edns.EDECode.BLOCKED
        answer.use_edns(options=[dns.edns.EDEOption(code, f"forkd: {why}")])
    return answer


def fail(query: dns.message.QueryMessage) -> dns.message.Message:
    """Return the answer to a question that could not be answered."""
    answer = dns.message.make_response(query, recursion_available=True)
    answer.set_rcode(dns.rcode.SERVFAIL)
    return answer


def is_for_addresses(query: dns.message.QueryMessage) -> bool:
    """Whether a question is for the addresses of a name."""
    question = query.question[0]
    return question.rdtype in _ADDRESSES and question.rdclass == dns.rdataclass.IN


def passes(query: dns.message.QueryMessage, asker: Asker) -> bool:
    """Whether the answer to a question that is not for addresses is passed on.

    Under `internet` it is; of a name on a list nobody needs more than addresses.
    """
    return asker.policy.internet and query.question[0].rdclass == dns.rdataclass.IN


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a name server said of the addresses of a name.

    Attributes:
        rcode: Its code.
        chain: The aliases that lead from the name.
        found: The addresses at their end; None for none.
        ttl_s: How long it holds from when it was said; 0 if it is not to be kept.
        at_s: When that was, in seconds of the resolver's clock.
    """

    rcode: dns.rcode.Rcode
    chain: tuple[dns.rrset.RRset, ...]
    found: dns.rrset.RRset | None
    ttl_s: int
    at_s: float


def resolved(
    query: dns.message.QueryMessage, upstream: dns.message.Message, at_s: float
) -> Resolved:
    """Return what a message from a name server says of the addresses that were asked for."""
    question = query.question[0]
    rcode = upstream.rcode()
    chain, found = _chain(upstream, question.name, question.rdtype)
    if found is None:
        is_known = rcode in {dns.rcode.NOERROR, dns.rcode.NXDOMAIN}
        return Resolved(rcode, tuple(chain), None, _absent_s(upstream) if is_known else 0, at_s)
    texts = [each.address for each in found][:ADDRESSES_MAX]
    kept = dns.rrset.from_text_list(found.name, found.ttl, found.rdclass, found.rdtype, texts)
    ttl_s = min((each.ttl for each in (*chain, found)), default=0)
    return Resolved(rcode, tuple(chain), kept, min(ttl_s, OPEN_S_MAX), at_s)


@dataclass(frozen=True, slots=True)
class Answered:
    """What a question for addresses came to.

    Attributes:
        message: What the sandbox is told.
        openings: What is opened for it first.
        seconds: For how long.
        why: Why it was refused after all; None if it was not.
    """

    message: dns.message.Message
    openings: tuple[Opening, ...] = ()
    seconds: int = OPEN_S_MIN
    why: Why | None = None


def answer(
    query: dns.message.QueryMessage, known: Resolved, asker: Asker, now_s: float
) -> Answered:
    """Return what a question for addresses comes to, by what is known of them."""
    age_s = int(now_s - known.at_s)
    message = dns.message.make_response(query, recursion_available=True)
    message.set_rcode(known.rcode)
    if known.found is None:
        message.answer.extend(_aged(each, age_s) for each in known.chain)
        return Answered(message)
    addresses = [ip_address(each.address) for each in known.found]
    kept = [each for each in addresses if _may_reach(asker.policy, each)]
    if addresses and not kept:
        return Answered(refuse(query, Why.PRIVATE), why=Why.PRIVATE)
    seconds = min(max(known.ttl_s - age_s, OPEN_S_MIN), OPEN_S_MAX)
    found = _aged(known.found, age_s, seconds)
    rrset = dns.rrset.from_text_list(
        found.name, found.ttl, found.rdclass, found.rdtype, [str(each) for each in kept]
    )
    message.answer.extend((*(_aged(each, age_s, seconds) for each in known.chain), rrset))
    return Answered(message, tuple(_openings(query, kept, asker)), seconds)


def pass_on(query: dns.message.QueryMessage, upstream: dns.message.Message) -> dns.message.Message:
    """Return what a name server answered, as the answer to a question like the one it was asked."""
    message = dns.message.make_response(query, recursion_available=True)
    message.set_rcode(upstream.rcode())
    for mine, theirs in zip(message.sections[1:], upstream.sections[1:], strict=True):
        mine.extend(theirs)
    return message


def _aged(rrset: dns.rrset.RRset, age_s: int, ttl_max_s: int = OPEN_S_MAX) -> dns.rrset.RRset:
    """Return records with the time to live that is left after so long."""
    ttl = min(max(rrset.ttl - age_s, 0), ttl_max_s)
    return dns.rrset.from_rdata_list(rrset.name, ttl, list(rrset))


def _absent_s(upstream: dns.message.Message) -> int:
    """Return how long it holds that there are no such records (RFC 2308, section 5)."""
    for each in upstream.authority:
        if each.rdtype == dns.rdatatype.SOA:
            return min(each.ttl, int(each[0].minimum), ABSENT_S_MAX)
    return 0


def to_wire(message: dns.message.Message, query: dns.message.QueryMessage | None) -> bytes:
    """Return a message as bytes; cut to what the asker takes over UDP, if `query` is given."""
    if query is None:
        return message.to_wire()
    room = max(query.payload, ANSWER_BYTES_MIN) if query.edns >= 0 else ANSWER_BYTES_MIN
    return message.to_wire(max_size=min(room, ANSWER_BYTES_MAX), prefer_truncation=True)


def _chain(
    upstream: dns.message.Message, name: dns.name.Name, rdtype: dns.rdatatype.RdataType
) -> tuple[list[dns.rrset.RRset], dns.rrset.RRset | None]:
    """Return the aliases that lead from a name, and the addresses at their end."""
    chain: list[dns.rrset.RRset] = []
    by_key = {(each.name, each.rdtype): each for each in upstream.answer}
    while len(chain) <= CHAIN_MAX:
        if (found := by_key.get((name, rdtype))) is not None:
            return chain, found
        alias = by_key.get((name, dns.rdatatype.CNAME))
        if alias is None or len(alias) != 1:
            return chain, None
        chain.append(alias)
        name = alias[0].target
    return [], None


def _openings(
    query: dns.message.QueryMessage, addresses: list[Address], asker: Asker
) -> list[Opening]:
    """Return what is opened: an address that is not public is by its own rule, at its ports."""
    name = name_of(query)
    return [
        Opening(asker.tap, address, protocol, port, name)
        for rule in asker.policy.named(name)
        for protocol in rule.protocols
        for port in (tuple(each.first for each in rule.ports) or (None,))
        for address in addresses
        if is_public(address)
    ]


def _may_reach(policy: NetworkPolicy, address: Address) -> bool:
    """Whether a name may lead to an address: a public one, or one that the policy names."""
    return is_public(address) or allows(policy.addresses, address)
