"""Questions upstream: equal ones are one, all have a turn, and answers are kept for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import dns.asyncquery
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from forkd.limits import (
    RESOLVER_QUESTIONS_BURST_MAX,
    RESOLVER_QUESTIONS_MAX,
    RESOLVER_QUESTIONS_PER_S_MAX,
    RESOLVER_QUESTIONS_PER_SANDBOX_MAX,
)
from forkd.model.caller import Tenant
from forkd.model.network import NetworkPolicy
from forkd.network import names, questions
from forkd.network import resolver as resolver_
from forkd.network.names import Asker, RefusedNames
from forkd.network.questions import Cache, Questions, Turns
from forkd.network.resolver import Buckets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from forkd.network.names import Resolved

OURS, THEIRS = Tenant("ours"), Tenant("theirs")
INTERNET = NetworkPolicy(internet=True)
DEADLINE_S = 5.0


class Clock:
    """Time that a test passes."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class NameServer:
    """A name server that answers when it is let."""

    ttl: int = 30
    kind: str = "A"

    def __post_init__(self) -> None:
        self.asked: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def ask(
        self, query: dns.message.QueryMessage, *_: object, **__: object
    ) -> tuple[dns.message.Message, bool]:
        name = query.question[0].name
        self.asked.append(name.to_text())
        await self.answers.wait()
        answer = dns.message.make_response(query)
        if self.kind == "SOA":
            soa = "ns. admin. 1 2 3 4 20"
            answer.authority.append(dns.rrset.from_text("test.", 900, "IN", "SOA", soa))
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif self.kind == "A":
            answer.answer.append(dns.rrset.from_text(name, self.ttl, "IN", "A", "203.0.113.1"))
        return answer, False


def asker(number: int = 0, tenant: Tenant = OURS) -> Asker:
    return Asker(f"sb-{number}", f"fk{number:04x}", tenant, 1, INTERNET, held=False, refused=_NONE)


_NONE = RefusedNames()


def query(name: str = "a.test", kind: str = "A") -> dns.message.QueryMessage:
    return dns.message.make_query(name, kind)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> NameServer:
    made = NameServer()
    monkeypatch.setattr(dns.asyncquery, "udp_with_fallback", made.ask)
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def asked(clock: Clock) -> Questions:
    return Questions(lambda: [("192.0.2.53", 53)], clock)


async def until(happened: Callable[[], bool]) -> None:
    """Let other tasks go on until something has happened."""
    async with asyncio.timeout(DEADLINE_S):
        while not happened():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


async def test_equal_questions_at_once_are_asked_once(asked: Questions, server: NameServer) -> None:
    server.answers.clear()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        spelled = ("a.test", "A.test", "a.TEST")
        same = [
            group.create_task(asked.resolve(query(name), asker(number)))
            for number, name in enumerate(spelled * 10)
        ]
        other = group.create_task(asked.resolve(query("a.test", "AAAA"), asker()))
        theirs = group.create_task(asked.resolve(query(), asker(tenant=THEIRS)))
        await until(lambda: len(server.asked) >= 3)
        server.answers.set()

    assert len(server.asked) == 3, "one for each kind, and for each tenant"
    assert all(each.result() is same[0].result() for each in same)
    assert None not in (same[0].result(), other.result(), theirs.result())


async def test_other_kinds_of_questions_are_shared_while_they_are_asked_and_not_kept(
    asked: Questions, server: NameServer
) -> None:
    server.kind = ""
    server.answers.clear()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(asked.ask(query(kind="TXT"), asker()))
        await until(lambda: bool(server.asked))
        server.answers.set()
    await asked.ask(query(kind="TXT"), asker())

    assert len(server.asked) == 2


async def test_a_crash_is_the_one_who_asks_and_others_that_wait_fail(
    asked: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = asyncio.Event()

    async def crash(*_: object, **__: object) -> None:
        await goes_on.wait()
        raise RuntimeError("as a bug would")

    monkeypatch.setattr(dns.asyncquery, "udp_with_fallback", crash)
    first, second = (asyncio.create_task(asked.resolve(query(), asker())) for _ in range(2))
    await until(lambda: asked._turns._waiting[asker().tap] == 2)  # noqa: SLF001
    goes_on.set()

    with pytest.raises(RuntimeError):
        await first
    assert await second is None


async def test_an_answer_is_kept_for_its_time_and_for_its_tenant(
    asked: Questions, server: NameServer, clock: Clock
) -> None:
    first = await asked.resolve(query(), asker())
    clock.now_s += 29
    assert await asked.resolve(query(), asker(1)) == first
    assert first is not None
    told = names.answer(query(), first, asker(), clock())
    assert told.message.answer[0].ttl == 1
    assert len(server.asked) == 1

    await asked.resolve(query(), asker(tenant=THEIRS))
    assert len(server.asked) == 2, "nobody learns by the time it takes what others asked for"

    clock.now_s += 1
    await asked.resolve(query(), asker())
    assert len(server.asked) == 3


@pytest.mark.parametrize(("ttl", "kept_s"), [(0, 0), (86_400, names.OPEN_S_MAX)])
async def test_nothing_is_kept_for_longer_than_it_may(
    asked: Questions, server: NameServer, clock: Clock, ttl: int, kept_s: int
) -> None:
    server.ttl = ttl
    await asked.resolve(query(), asker())
    clock.now_s += kept_s
    await asked.resolve(query(), asker())

    assert len(server.asked) == 2


async def test_that_there_is_no_such_name_is_kept_as_long_as_its_zone_says(
    asked: Questions, server: NameServer, clock: Clock
) -> None:
    server.kind = "SOA"
    for passed_s, times in ((0, 1), (19, 1), (1, 2)):
        clock.now_s += passed_s
        found = await asked.resolve(query(), asker())
        assert found is not None
        assert found.rcode == dns.rcode.NXDOMAIN
        assert len(server.asked) == times

    server.kind = ""  # an answer without a word on how long it holds
    await asked.resolve(query("b.test"), asker())
    await asked.resolve(query("b.test"), asker())
    assert server.asked.count("b.test.") == 2


@contextlib.asynccontextmanager
async def taken(turns: Turns, who: Asker, count: int) -> AsyncIterator[None]:
    """Have so many turns for the block."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            assert await stack.enter_async_context(turns.turn(who))
        yield


async def test_who_finds_no_place_waits_for_one() -> None:
    turns, came = Turns(), []

    async def ask() -> None:
        async with turns.turn(asker()) as is_mine:
            came.append(is_mine)

    async with taken(turns, asker(), RESOLVER_QUESTIONS_PER_SANDBOX_MAX):
        waiting = asyncio.create_task(ask())
        await asyncio.sleep(0)
        assert came == []
        async with taken(turns, asker(1), RESOLVER_QUESTIONS_PER_SANDBOX_MAX):
            pass  # which is another sandbox'
    await waiting
    assert came == [True]


async def test_a_turn_that_does_not_come_in_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(questions, "TURN_S", 0.0)
    turns = Turns()
    async with (
        taken(turns, asker(), RESOLVER_QUESTIONS_PER_SANDBOX_MAX),
        turns.turn(asker()) as is_mine,
    ):
        assert not is_mine
    async with taken(turns, asker(), RESOLVER_QUESTIONS_PER_SANDBOX_MAX):
        pass


async def test_who_waits_and_is_cancelled_keeps_no_place() -> None:
    turns = Turns()

    async def ask() -> None:
        async with turns.turn(asker()):
            raise AssertionError

    async with taken(turns, asker(), RESOLVER_QUESTIONS_PER_SANDBOX_MAX):
        early, late = (asyncio.create_task(ask()) for _ in range(2))
        await asyncio.sleep(0)
        early.cancel()
        await asyncio.wait([early])
    late.cancel()  # it was given its turn, and has not noticed yet
    await asyncio.wait([late])
    async with taken(turns, asker(), RESOLVER_QUESTIONS_PER_SANDBOX_MAX):
        pass


async def test_one_tenant_leaves_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "TURN_S", 0.0)
    turns = Turns()
    async with contextlib.AsyncExitStack() as stack:
        counts: Counter[Tenant] = Counter()
        for tenant in (OURS, THEIRS):
            for number in range(RESOLVER_QUESTIONS_MAX):
                who = asker(number, tenant)
                who = replace(who, tap=f"{tenant}{number}")
                counts[tenant] += await stack.enter_async_context(turns.turn(who))
    assert counts == {OURS: RESOLVER_QUESTIONS_MAX // 2, THEIRS: RESOLVER_QUESTIONS_MAX // 4}


async def test_of_those_who_wait_each_sandbox_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(questions, "RESOLVER_QUESTIONS_MAX", 2)  # one for a tenant
    turns, came = Turns(), []

    async def ask(who: Asker) -> None:
        async with turns.turn(who) as is_mine:
            assert is_mine
            came.append(who.tap)
            await asyncio.sleep(0)

    async with taken(turns, asker(9), 1):
        tasks = [asyncio.create_task(ask(asker(number))) for number in (0, 0, 0, 1, 2)]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)

    assert came == ["fk0000", "fk0001", "fk0002", "fk0000", "fk0000"]


async def test_so_many_questions_wait_and_no_more(
    asked: Questions, server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "RESOLVER_WAITING_PER_SANDBOX_MAX", 2)
    server.answers.clear()
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(asked.resolve(query(f"{n}.test"), asker())) for n in range(2)]
        await until(lambda: len(server.asked) == 2)

        assert await asked.resolve(query("one-more.test"), asker()) is None
        other = group.create_task(asked.resolve(query("other.test"), asker(1)))
        await until(lambda: len(server.asked) == 3)
        server.answers.set()
    assert None not in [each.result() for each in (*tasks, other)]


def found(ttl_s: int, at_s: float) -> Resolved:
    return names.Resolved(dns.rcode.NOERROR, (), None, ttl_s, at_s)


def test_a_tenant_fills_its_share_of_the_cache_and_drops_its_oldest(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(questions, "RESOLVER_CACHED_MAX", 8)
    cache = Cache(clock)
    keys = [questions._key(query(f"{n}.test"), asker()) for n in range(6)]  # noqa: SLF001
    theirs = questions._key(query(), asker(tenant=THEIRS))  # noqa: SLF001
    cache.keep(theirs, found(5, clock()))

    for key in keys:
        cache.keep(key, found(30, clock()))

    assert [key for key in keys if cache.get(key)] == keys[-4:]
    assert cache.get(theirs)
    clock.now_s += 10
    assert cache.get(theirs) is None
    cache.keep(keys[-1], found(0, clock()))
    assert cache.get(keys[-1]) is None


def test_a_sandbox_may_ask_a_lot_at_once_and_so_much_in_a_second(clock: Clock) -> None:
    buckets = Buckets(clock)

    def take_all() -> int:
        taken = 0
        while buckets.take("fk0000"):
            taken += 1
        return taken

    assert take_all() == RESOLVER_QUESTIONS_BURST_MAX
    assert buckets.take("fk0001"), "another has its own"
    clock.now_s += 2.0
    assert take_all() == 2 * RESOLVER_QUESTIONS_PER_S_MAX
    assert buckets.owe("fk0000") == pytest.approx(1 / RESOLVER_QUESTIONS_PER_S_MAX)
    assert buckets.owe("fk0000") == pytest.approx(2 / RESOLVER_QUESTIONS_PER_S_MAX)
    clock.now_s += 3_600.0
    assert take_all() == RESOLVER_QUESTIONS_BURST_MAX


def test_those_that_asked_nothing_lately_are_forgotten(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver_, "BUCKETS_MAX", 2)
    buckets = Buckets(clock)
    for tap in ("fk0000", "fk0001", "fk0002"):
        buckets.take(tap)
        clock.now_s += 1.0
    assert list(buckets._full_s) == ["fk0002"]  # noqa: SLF001
