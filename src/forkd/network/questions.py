"""What is asked upstream: equal questions once, and what was answered lately not again.

A sandbox that asks many names at once waits for its turn, and is not refused: programs look up all
that they need in their first second.  What one tenant was answered is told to that tenant only, so
that nobody learns from the time that an answer takes what others asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import dns.asyncquery
import dns.message
import dns.name
import dns.rdataclass
import dns.rdatatype
from dns.exception import DNSException

from forkd.limits import (
    RESOLVER_CACHED_MAX,
    RESOLVER_QUESTIONS_MAX,
    RESOLVER_QUESTIONS_PER_SANDBOX_MAX,
    RESOLVER_WAITING_MAX,
    RESOLVER_WAITING_PER_SANDBOX_MAX,
)
from forkd.model.shares import Shares
from forkd.network import names

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from forkd.model.caller import Tenant
    from forkd.network.names import Asker, Resolved

UPSTREAM_S = 5.0
"""How long one server upstream may take to answer before the next is asked."""

TURN_S = 8.0
"""How long a question waits to be asked upstream, before it fails."""

SWEEP_S = 1.0
"""How often the cache, when it is full, is searched for what holds no more."""

Upstream: TypeAlias = tuple[str, int]
"""Address and port of a server that is asked."""

_Key: TypeAlias = "tuple[Tenant, dns.name.Name, dns.rdatatype.RdataType, dns.rdataclass.RdataClass]"

T = TypeVar("T")

log = logging.getLogger(__name__)


class Questions:
    """Asks the name servers of this host.

    Args:
        upstreams: Returns whom to ask, in turn.
        clock: Tells monotonic time, in seconds.
    """

    def __init__(
        self, upstreams: Callable[[], Sequence[Upstream]], clock: Callable[[], float]
    ) -> None:
        self._upstreams = upstreams
        self._clock = clock
        self._turns = Turns()
        self._cache = Cache(clock)
        self._resolving: dict[_Key, asyncio.Future[Resolved | None]] = {}
        self._asking: dict[_Key, asyncio.Future[dns.message.Message | None]] = {}

    async def resolve(self, query: dns.message.QueryMessage, asker: Asker) -> Resolved | None:
        """Return what is known of the addresses of a name; None if nobody answers."""
        key = _key(query, asker)

        async def ask() -> Resolved | None:
            upstream = await self._ask(query)
            if upstream is None:
                return None
            found = names.resolved(query, upstream, self._clock())
            self._cache.keep(key, found)
            return found

        return await self._once(self._resolving, key, asker, ask, lambda: self._cache.get(key))

    async def ask(
        self, query: dns.message.QueryMessage, asker: Asker
    ) -> dns.message.Message | None:
        """Return what a name server answers to a question of any kind; None if nobody answers."""
        key = _key(query, asker)
        return await self._once(self._asking, key, asker, lambda: self._ask(query), lambda: None)

    async def _once(
        self,
        running: dict[_Key, asyncio.Future[T | None]],
        key: _Key,
        asker: Asker,
        work: Callable[[], Awaitable[T | None]],
        known: Callable[[], T | None],
    ) -> T | None:
        """Return what is known, or comes of `work`, which runs once for all who want it now."""
        if (found := known()) is not None:
            return found
        with self._turns.waiting(asker) as may_wait:
            if not may_wait:
                return None
            if key not in running:
                async with self._turns.turn(asker) as is_mine:
                    if not is_mine:
                        return None
                    if (found := known()) is not None:
                        return found
                    if key not in running:
                        return await _lead(running, key, work)
            return await asyncio.shield(running[key])

    async def _ask(self, query: dns.message.QueryMessage) -> dns.message.Message | None:
        name, kind = query.question[0].name, query.question[0].rdtype
        asked = dns.message.make_query(name, kind, use_edns=0)
        for address, port in self._upstreams():
            try:
                answered, _ = await dns.asyncquery.udp_with_fallback(
                    asked, address, timeout=UPSTREAM_S, port=port
                )
            except (DNSException, OSError, EOFError, ValueError) as error:
                about = {"server": address, "error": str(error) or type(error).__name__}
                log.info("name server did not answer", extra=about)
            else:
                return answered
        return None


async def _lead(
    running: dict[_Key, asyncio.Future[T | None]],
    key: _Key,
    work: Callable[[], Awaitable[T | None]],
) -> T | None:
    """Do `work`, and tell what came of it to whoever waits for the same."""
    told: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
    running[key] = told
    found = None
    try:
        found = await work()
    finally:
        del running[key]
        told.set_result(found)
    return found


def _key(query: dns.message.QueryMessage, asker: Asker) -> _Key:
    question = query.question[0]
    return asker.tenant, question.name, question.rdtype, question.rdclass


class Turns:
    """Who may ask upstream now, and who waits for that.

    Each sandbox asks so much at once, each tenant has its share, and of those who wait each sandbox
    has its turn.
    """

    def __init__(self) -> None:
        self._asking: Counter[str] = Counter()
        self._places = Shares(RESOLVER_QUESTIONS_MAX)
        self._waiting: Counter[str] = Counter()
        self._waiting_places = Shares(RESOLVER_WAITING_MAX)
        self._queues: OrderedDict[str, deque[tuple[asyncio.Future[None], Tenant]]] = OrderedDict()

    @contextlib.contextmanager
    def waiting(self, asker: Asker) -> Iterator[bool]:
        """Count a question that is asked or waits; yield whether there may be another."""
        is_full = self._waiting[asker.tap] >= RESOLVER_WAITING_PER_SANDBOX_MAX
        if is_full or not self._waiting_places.take(asker.tenant):
            yield False
            return
        self._waiting[asker.tap] += 1
        try:
            yield True
        finally:
            self._waiting_places.give_back(asker.tenant)
            _less(self._waiting, asker.tap)

    @contextlib.asynccontextmanager
    async def turn(self, asker: Asker) -> AsyncIterator[bool]:
        """Wait for a turn, and have it within the block; yield whether it came in time."""
        if not await self._come(asker.tap, asker.tenant):
            yield False
            return
        try:
            yield True
        finally:
            self._go(asker.tap, asker.tenant)

    async def _come(self, tap: str, tenant: Tenant) -> bool:
        if tap not in self._queues and self._take(tap, tenant):
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tap, deque()).append((turn, tenant))
        try:
            async with asyncio.timeout(TURN_S):
                await asyncio.shield(turn)
        except TimeoutError:
            return turn.done() or self._give_up(tap, tenant, turn)
        except asyncio.CancelledError:
            if turn.done():
                self._go(tap, tenant)
            else:
                self._give_up(tap, tenant, turn)
            raise
        return True

    def _give_up(self, tap: str, tenant: Tenant, turn: asyncio.Future[None]) -> bool:
        queue = self._queues[tap]
        queue.remove((turn, tenant))
        if not queue:
            del self._queues[tap]
        return False

    def _take(self, tap: str, tenant: Tenant) -> bool:
        if self._asking[tap] >= RESOLVER_QUESTIONS_PER_SANDBOX_MAX:
            return False
        if not self._places.take(tenant):
            return False
        self._asking[tap] += 1
        return True

    def _go(self, tap: str, tenant: Tenant) -> None:
        """Give a turn back, and to whoever waits and may have it: each sandbox one in turn."""
        self._places.give_back(tenant)
        _less(self._asking, tap)
        for each in tuple(self._queues):
            queue = self._queues[each]
            turn, whose = queue[0]
            if not self._take(each, whose):
                continue
            queue.popleft()
            turn.set_result(None)
            self._queues.move_to_end(each)
            if not queue:
                del self._queues[each]


def _less(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


class Cache:
    """What tenants were answered lately, each its own.

    Args:
        clock: Tells monotonic time, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._places = Shares(RESOLVER_CACHED_MAX)
        self._kept: dict[Tenant, OrderedDict[_Key, Resolved]] = {}
        self._swept_s = -SWEEP_S

    def get(self, key: _Key) -> Resolved | None:
        """Return what is known of a question; None if nothing is, or not any more."""
        kept = self._kept.get(key[0])
        found = None if kept is None else kept.get(key)
        if found is None or self._holds(found):
            return found
        self._drop(key)
        return None

    def keep(self, key: _Key, found: Resolved) -> None:
        """Keep what was answered for as long as it holds, if the tenant has room for it."""
        tenant = key[0]
        if key in self._kept.get(tenant, ()):
            self._drop(key)
        if not found.ttl_s:
            return
        if not self._places.room(tenant):
            self._drop_old(tenant)
        if self._places.take(tenant):
            self._kept.setdefault(tenant, OrderedDict())[key] = found

    def _holds(self, found: Resolved) -> bool:
        return self._clock() < found.at_s + found.ttl_s

    def _drop_old(self, tenant: Tenant) -> None:
        """Drop what holds no more, whoever's it is, and else what this tenant has had longest."""
        if self._clock() >= self._swept_s + SWEEP_S:
            self._swept_s = self._clock()
            for kept in tuple(self._kept.values()):
                for key in [key for key, found in kept.items() if not self._holds(found)]:
                    self._drop(key)
        if not self._places.room(tenant) and tenant in self._kept:
            self._drop(next(iter(self._kept[tenant])))

    def _drop(self, key: _Key) -> None:
        tenant = key[0]
        kept = self._kept[tenant]
        del kept[key]
        if not kept:
            del self._kept[tenant]
        self._places.give_back(tenant)
