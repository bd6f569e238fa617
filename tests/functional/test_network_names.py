"""Names: a guest is answered what its policy allows, and may reach what it was answered.

The resolver runs as the daemon runs it; the server that it asks is real, and in another namespace.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

import dns.edns
import dns.exception
import dns.message
import dns.query
import dns.rcode
import pytest

from forkd.limits import RESOLVER_QUESTIONS_PER_SANDBOX_MAX
from forkd.model.network import RefusedName, parse_policy
from forkd.network import names as names_
from forkd.network import questions as questions_
from forkd.network.rules import Wall
from forkd.service.egress import Egress
from forkd.service.supervision import Supervisor
from tests.support import outside as world
from tests.support.name_server import PORT, NameServer, serving_names
from tests.support.outside import CELLS, FAMILIES, PLAN, PROTOCOLS, Outside, outside
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")

pytestmark = [pytest.mark.needs("root", "nft")]

GATEWAY = PLAN.slot(0).host
GATEWAYS = (GATEWAY, PLAN.slot(0).host_v6)
SILENT_S = 2.0
"""How long a question that nobody answers is waited for."""
SOURCE_PORT = 20_053
"""Outside of the ports that the kernel draws from."""
NAMES = {
    ("example.com", "A"): (30, [world.PUBLIC[0]]),
    ("example.com", "AAAA"): (30, [world.PUBLIC[1]]),
    ("example.com", "TXT"): (30, ['"text"']),
    ("other.test", "A"): (30, [world.PUBLIC[0]]),
    ("other.test", "AAAA"): (30, [world.PUBLIC[1]]),
    ("a.b.example.org", "A"): (7_200, [world.OTHER[0]]),
    ("example.org", "A"): (30, [world.OTHER[0]]),
    ("alias.example.com", "CNAME"): (5, ["more.test."]),
    ("more.test", "CNAME"): (600, ["end.test."]),
    ("end.test", "A"): (600, [world.PUBLIC[0]]),
    ("loop.example.com", "CNAME"): (5, ["loop.example.com."]),
    ("rebound.example.com", "A"): (5, [world.PRIVATE[0], world.METADATA[0], "127.0.0.1"]),
    ("rebound.example.com", "AAAA"): (
        5,
        [
            world.PRIVATE[1],
            world.METADATA[1],
            "::1",
            "fe80::1",
            "::ffff:10.99.0.1",
            "64:ff9b::a63:1",
        ],
    ),
    ("half.example.com", "A"): (5, [world.PRIVATE[0], world.PUBLIC[0]]),
    ("half.example.com", "AAAA"): (5, ["::ffff:203.0.113.10", world.PUBLIC[1]]),
    ("many.example.com", "A"): (5, [f"203.0.113.{n}" for n in range(100, 200)]),
}


@dataclass
class Asking:
    """What a test asks with."""

    outer: Outside
    egress: Egress

    async def put(self, *rules: str, held: bool = False, lease: str = "sb-0") -> Wall:
        policy = parse_policy(list(rules))
        assert policy is not None
        wall = Wall(lease, PLAN.slot(0), policy, held)
        await self.egress.put([wall])
        return wall

    async def ask(  # noqa: PLR0913 - what a question consists of
        self,
        name: str,
        kind: str = "A",
        *,
        tcp: bool = False,
        gateway: str = GATEWAY,
        source_port: int = 0,
        timeout_s: float = world.DEADLINE_S,
    ) -> dns.message.Message:
        query = dns.message.make_query(name, kind, use_edns=0)
        way = dns.query.tcp if tcp else dns.query.udp
        return await self.in_guest(
            lambda: way(query, gateway, timeout=timeout_s, source_port=source_port)
        )

    async def try_(self, protocol: str, address: str, port: int) -> str:
        return await self.in_guest(lambda: world.attempt(protocol, address, port))

    async def in_guest(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(self.outer.guests[0].run, work)


@pytest.fixture(scope="module")
def outer() -> Iterator[Outside]:
    with outside(2) as made:
        yield made


@pytest.fixture
def server(outer: Outside) -> Iterator[NameServer]:
    made = NameServer(dict(NAMES))
    with serving_names(outer.world, world.NAME_SERVER, made):
        yield made


def scenario(outer: Outside, work: Callable[[Asking], Awaitable[None]]) -> None:
    """Do `work` on the host, with a resolver."""

    async def run() -> None:
        async with Supervisor() as tasks:
            egress = Egress(PLAN, tasks, [(world.NAME_SERVER, PORT)])
            try:
                await work(Asking(outer, egress))
            finally:
                await egress.take([PLAN.slot(0).tap])
                egress.close()

    outer.host.run(lambda: asyncio.run(run()))


def addresses(answer: dns.message.Message) -> list[str]:
    return sorted(
        each.address for rrset in answer.answer for each in rrset if hasattr(each, "address")
    )


@pytest.mark.parametrize("gateway", GATEWAYS, ids=["over IPv4", "over IPv6"])
@pytest.mark.parametrize("tcp", [False, True], ids=["UDP", "TCP"])
@pytest.mark.parametrize("kind", ["A", "AAAA"])
def test_an_allowed_name_is_answered_and_what_it_leads_to_opens(
    outer: Outside,
    server: NameServer,
    kind: str,
    gateway: str,
    tcp: bool,  # noqa: FBT001 - a table
) -> None:
    async def work(asking: Asking) -> None:
        await asking.put("example.com:443")
        address = world.PUBLIC[0 if kind == "A" else 1]
        assert await asking.try_("tcp", address, 443) == "refused"

        answer = await asking.ask("Example.COM", kind, tcp=tcp, gateway=gateway)

        assert addresses(answer) == [address]
        assert await asking.try_("tcp", address, 443) == "reached"
        assert await asking.try_("udp", address, 443) == "reached"
        assert await asking.try_("tcp", address, 80) == "refused"
        assert await asking.try_("icmp", address, 0) == "refused"
        assert server.asked == ["Example.COM"]

    scenario(outer, work)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("gateway", GATEWAYS, ids=["over IPv4", "over IPv6"])
def test_a_port_that_asked_an_earlier_resolver_is_answered_by_the_next(
    outer: Outside, gateway: str
) -> None:
    """Connection tracking would lead it to where the earlier one listened."""

    async def work(asking: Asking) -> None:
        await asking.put("example.com:443")
        answer = await asking.ask("example.com", gateway=gateway, source_port=SOURCE_PORT)
        assert addresses(answer) == [world.PUBLIC[0]]

    scenario(outer, work)
    scenario(outer, work)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "rule", ["example.com:443", "example.com/icmp", "*.test:443", "*.test/icmp"]
)
def test_a_name_opens_its_address_once_it_was_asked_for_and_nothing_else_ever(
    outer: Outside, server: NameServer, rule: str, protocol: str, family: str
) -> None:
    number = FAMILIES[family]
    names = ["example.com", "other.test"]
    name, elsewhere = names if rule.startswith("example") else reversed(names)
    reached = {"public"} if rule.endswith("icmp") == (protocol == "icmp") else set()
    same = {"other port"} if protocol == "icmp" and reached else set()

    async def work(asking: Asking) -> None:
        await asking.put(rule)
        before = await asyncio.to_thread(outer.try_all, protocol, number)
        await asking.ask(name, ("A", "AAAA")[number])
        refused = await asking.ask(elsewhere, ("A", "AAAA")[number])

        after = await asyncio.to_thread(outer.try_all, protocol, number)

        assert before == dict.fromkeys(CELLS, "refused"), "also its address, until it asked"
        assert refused.rcode() == dns.rcode.NXDOMAIN, "a name of the same address"
        expected = {cell: "reached" if cell in reached | same else "refused" for cell in CELLS}
        assert after == expected
        assert server.asked == [name]

    scenario(outer, work)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("a.b.example.org", True),
        ("example.org", False),
        ("example.com", False),
        ("other.test", False),
    ],
)
def test_a_name_that_is_not_allowed_is_refused_at_once_and_asked_of_nobody(
    outer: Outside,
    server: NameServer,
    name: str,
    allowed: bool,  # noqa: FBT001 - a table
) -> None:
    async def work(asking: Asking) -> None:
        wall = await asking.put("*.example.org")

        answer = await asking.ask(name)

        assert bool(answer.answer) is allowed
        assert bool(server.asked) is allowed
        status = await asking.egress.status(wall)
        if not allowed:
            assert answer.rcode() == dns.rcode.NXDOMAIN
            (why,) = answer.options
            assert isinstance(why, dns.edns.EDEOption)
            assert "not allowed" in str(why.text)
            assert status.refused_names == (RefusedName(name, "not allowed", 1),)
            assert status.refused_questions == 1

    scenario(outer, work)


def test_a_chain_of_aliases_is_followed_and_lives_as_long_as_its_shortest(
    outer: Outside, server: NameServer
) -> None:
    async def work(asking: Asking) -> None:
        await asking.put("*.example.com:443")

        answer = await asking.ask("alias.example.com")

        assert addresses(answer) == [world.PUBLIC[0]]
        assert len(answer.answer) == 3
        assert max(each.ttl for each in answer.answer) <= 60
        assert await asking.try_("tcp", world.PUBLIC[0], 443) == "reached"
        assert (await asking.ask("end.test")).rcode() == dns.rcode.NXDOMAIN
        assert not (await asking.ask("loop.example.com")).answer

    scenario(outer, work)
    assert server.asked == ["alias.example.com", "loop.example.com"]


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("rules", [("internet",), ("*.example.com",)], ids=" ".join)
@pytest.mark.parametrize("kind", ["A", "AAAA"])
def test_a_public_name_does_not_lead_to_private_addresses(
    outer: Outside, rules: tuple[str, ...], kind: str
) -> None:
    async def work(asking: Asking) -> None:
        wall = await asking.put(*rules)

        answer = await asking.ask("rebound.example.com", kind)

        assert addresses(answer) == []
        assert answer.rcode() == dns.rcode.NXDOMAIN
        (refused,) = (await asking.egress.status(wall)).refused_names
        assert refused.why == "resolves to addresses that are not public"
        number = ("A", "AAAA").index(kind)
        half = await asking.ask("half.example.com", kind)
        assert addresses(half) == [world.PUBLIC[number]]
        assert await asking.try_("tcp", world.PRIVATE[number], 443) == "refused"
        assert await asking.try_("tcp", world.METADATA[number], 80) == "refused"

    scenario(outer, work)


@pytest.mark.usefixtures("server")
def test_a_private_address_that_a_rule_allows_may_have_a_name(outer: Outside) -> None:
    async def work(asking: Asking) -> None:
        await asking.put("*.example.com:443", "10.99.0.0/16:80")

        answer = await asking.ask("rebound.example.com")

        assert addresses(answer) == [world.PRIVATE[0]]

    scenario(outer, work)


@pytest.mark.usefixtures("server")
def test_internet_resolves_every_name_of_every_kind(outer: Outside) -> None:
    async def work(asking: Asking) -> None:
        await asking.put("internet")
        assert addresses(await asking.ask("other.test")) == [world.PUBLIC[0]]
        assert "text" in (await asking.ask("example.com", "TXT")).answer[0].to_text()
        assert (await asking.ask("nowhere.test")).rcode() == dns.rcode.NXDOMAIN

        await asking.put("example.com")
        assert not (await asking.ask("example.com", "TXT")).answer

    scenario(outer, work)


@pytest.mark.usefixtures("server")
def test_what_a_name_has_opened_stays_open_while_the_policy_allows_it(outer: Outside) -> None:
    async def work(asking: Asking) -> None:
        await asking.put("example.com:443", "a.test")
        await asking.ask("example.com")
        address = world.PUBLIC[0]

        await asking.put("*.com", "example.com:80,443")
        assert await asking.try_("tcp", address, 443) == "reached"
        assert await asking.try_("tcp", address, 80) == "refused", "until it is asked for again"
        await asking.put("example.com:443", held=True)
        assert await asking.try_("tcp", address, 443) == "refused"
        await asking.put("example.com:443")
        assert await asking.try_("tcp", address, 443) == "reached"
        await asking.put("example.com:443/tcp")
        assert await asking.try_("udp", address, 443) == "refused"
        await asking.put("example.com:80")
        await asking.put("example.com:443")
        assert await asking.try_("tcp", address, 443) == "refused"
        await asking.ask("example.com")
        await asking.put("example.com:443", lease="sb-1")
        assert await asking.try_("tcp", address, 443) == "refused"

    scenario(outer, work)


@pytest.mark.usefixtures("server")
def test_a_name_that_is_taken_from_the_policy_leads_nowhere_at_once(outer: Outside) -> None:
    async def work(asking: Asking) -> None:
        await asking.put("example.com:443")
        await asking.ask("example.com")
        assert await asking.try_("tcp", world.PUBLIC[0], 443) == "reached"

        await asking.put("deny-all")

        assert await asking.try_("tcp", world.PUBLIC[0], 443) == "refused"
        assert (await asking.ask("example.com")).rcode() == dns.rcode.NXDOMAIN

    scenario(outer, work)


def test_held_egress_resolves_nothing(outer: Outside, server: NameServer) -> None:
    async def work(asking: Asking) -> None:
        await asking.put("internet", held=True)
        answer = await asking.ask("example.com")
        assert answer.rcode() == dns.rcode.NXDOMAIN
        assert "held" in str(answer.options[0])
        assert server.asked == []

    scenario(outer, work)


def test_long_answers_are_cut_over_udp_and_whole_over_tcp(
    outer: Outside, server: NameServer
) -> None:
    async def work(asking: Asking) -> None:
        await asking.put("internet")
        cut = await asking.ask("many.example.com")
        whole = await asking.ask("many.example.com", tcp=True)
        assert len(cut.to_wire()) <= 1_232
        assert len(addresses(whole)) == 64

    server.truncates = True
    scenario(outer, work)


def test_a_server_that_is_silent_or_away_is_one_error_for_the_question(
    outer: Outside, server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions_, "UPSTREAM_S", 0.2)

    async def work(asking: Asking) -> None:
        await asking.put("internet")
        assert (await asking.ask("example.com")).rcode() == dns.rcode.SERVFAIL
        server.silent = False
        assert addresses(await asking.ask("example.com")) == [world.PUBLIC[0]]

    server.silent = True
    scenario(outer, work)


def test_many_threads_at_once_resolve_all_that_they_ask_for(
    outer: Outside, server: NameServer
) -> None:
    names = [f"n{number}.example.com" for number in range(20)]
    for kind, address in zip(("A", "AAAA"), world.PUBLIC, strict=True):
        server.records |= {(name, kind): (30, [address]) for name in names}
    server.delay_s = 0.1  # so that more wait than are asked at once
    assert 2 * len(names) > RESOLVER_QUESTIONS_PER_SANDBOX_MAX

    def resolve(name: str) -> dns.rcode.Rcode:
        """Ask for both kinds of addresses over one socket, as a C library does."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(world.DEADLINE_S)
            sock.connect((GATEWAY, PORT))
            for kind in ("A", "AAAA"):
                sock.send(dns.message.make_query(name, kind).to_wire())
            found = [dns.message.from_wire(sock.recv(512)).rcode() for _ in range(2)]
            return max(found)

    def resolve_all() -> Counter[dns.rcode.Rcode]:
        with ThreadPoolExecutor(60) as pool:
            return Counter(pool.map(resolve, names * 3))

    async def work(asking: Asking) -> None:
        await asking.put("internet")
        assert await asking.in_guest(resolve_all) == {dns.rcode.NOERROR: 60}
        assert Counter(server.asked) == dict.fromkeys(names, 2), "equal questions are asked once"

    scenario(outer, work)


def test_an_answer_is_kept_for_its_time_and_opens_what_the_policy_of_now_allows(
    outer: Outside, server: NameServer
) -> None:
    async def work(asking: Asking) -> None:
        await asking.put("internet")
        await asking.ask("example.com")
        await asking.ask("EXAMPLE.com", tcp=True)
        assert server.asked == ["example.com"]

        await asking.put("example.com:443")
        answer = await asking.ask("example.com")

        assert server.asked == ["example.com"]
        assert answer.answer[0].ttl <= 30
        assert await asking.try_("tcp", world.PUBLIC[0], 443) == "reached"
        assert await asking.try_("tcp", world.PUBLIC[0], 80) == "refused"
        await asking.put("deny-all")
        assert (await asking.ask("example.com")).rcode() == dns.rcode.NXDOMAIN

    scenario(outer, work)


@pytest.mark.parametrize("tcp", [False, True], ids=["UDP", "TCP"])
@pytest.mark.parametrize("end", ["a tightened policy", "being held", "the next sandbox"])
def test_a_late_answer_opens_nothing_for_who_did_not_ask_under_that_policy(
    outer: Outside,
    server: NameServer,
    end: str,
    tcp: bool,  # noqa: FBT001 - a table
) -> None:
    server.holds = True

    async def work(asking: Asking) -> None:
        await asking.put("example.com:443")
        asked = asking.ask("example.com", tcp=tcp, timeout_s=SILENT_S)
        question = asyncio.create_task(asked)
        await until(lambda: bool(server.asked))
        if end == "the next sandbox":
            await asking.egress.take([PLAN.slot(0).tap])
            await asking.put("example.com:443", lease="sb-1")
        elif end == "being held":
            await asking.put("example.com:443", held=True)
        else:
            await asking.put("other.test:443")
        server.release()

        if end == "the next sandbox":
            with pytest.raises((dns.exception.Timeout, EOFError)):
                await question
        else:
            assert (await question).rcode() == dns.rcode.NXDOMAIN
        assert await asking.try_("tcp", world.PUBLIC[0], 443) == "refused"

    scenario(outer, work)


def test_a_name_that_leads_to_an_allowed_private_address_opens_no_more_of_it(
    outer: Outside, server: NameServer
) -> None:
    private = str(world.PRIVATE[0])
    server.records["inner.example.com", "A"] = (5, [private, world.PUBLIC[0]])

    async def work(asking: Asking) -> None:
        await asking.put(f"{private}:80/tcp", "*.example.com")

        assert addresses(await asking.ask("inner.example.com")) == sorted(
            [private, world.PUBLIC[0]]
        )

        assert await asking.try_("tcp", private, 80) == "reached"
        assert await asking.try_("tcp", private, 443) == "refused"
        assert await asking.try_("udp", private, 80) == "refused"
        assert await asking.try_("tcp", world.PUBLIC[0], 443) == "reached"

    scenario(outer, work)


@pytest.mark.parametrize(
    "wire",
    [b"", b"\0", b"\xff" * 40, b"\0\1\1\0\0\2\0\0\0\0\0\0" + b"\1a\0\0\1\0\1" * 2, b"\0" * 5_000],
    ids=["empty", "short", "noise", "two questions", "long"],
)
def test_what_is_no_question_is_not_answered_and_harms_nobody(
    outer: Outside, server: NameServer, wire: bytes
) -> None:
    async def work(asking: Asking) -> None:
        await asking.put("internet")
        await asking.in_guest(lambda: world.send(None, GATEWAY, PORT, wire))
        assert addresses(await asking.ask("example.com")) == [world.PUBLIC[0]]

    scenario(outer, work)
    assert server.asked == ["example.com"]


@pytest.mark.usefixtures("server")
def test_a_crash_costs_the_question_that_it_was_over(
    outer: Outside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parse = names_.parse

    def crash(_: bytes) -> dns.message.QueryMessage | None:
        monkeypatch.setattr(names_, "parse", parse)
        raise RuntimeError("as a bug would")

    monkeypatch.setattr(names_, "parse", crash)

    async def work(asking: Asking) -> None:
        await asking.put("internet")
        query = dns.message.make_query("example.com", "A").to_wire()
        await asking.in_guest(lambda: world.send(None, GATEWAY, PORT, query))
        assert addresses(await asking.ask("example.com")) == [world.PUBLIC[0]]

    scenario(outer, work)
    assert "as a bug would" in caplog.text


def test_a_resolver_that_ends_by_itself_ends_the_service(outer: Outside) -> None:
    async def run() -> None:
        async with Supervisor() as tasks:
            egress = Egress(PLAN, tasks, [(world.NAME_SERVER, PORT)])
            wall = Wall("sb-0", PLAN.slot(0), parse_policy("internet") or _no())
            await egress.put([wall])
            for each in egress.resolver._packets:  # noqa: SLF001 - as if the kernel closed them
                each.abort()

            assert "resolver" in await asyncio.wait_for(tasks.until_failed(), world.DEADLINE_S)
            await egress.take([wall.slot.tap])

    outer.host.run(lambda: asyncio.run(run()))


def test_a_resolver_that_was_closed_does_not_end_the_one_that_is_started_then(
    outer: Outside,
) -> None:
    async def work(asking: Asking) -> None:
        await asking.put("internet")
        resolver = asking.egress.resolver
        resolver.close()
        await resolver.start(ipv6=True)
        ended = asyncio.create_task(resolver.until_ended())
        closed = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(closed.set_result, None)  # after what was closed
        await closed
        assert not ended.done()

        resolver.close()
        await asyncio.wait_for(ended, world.DEADLINE_S)

    scenario(outer, work)


def _no() -> NoReturn:
    raise AssertionError
