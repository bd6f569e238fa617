"""An event loop that gives each tenant who has something to do an equal share of its time.

The daemon has one event loop.  asyncio runs what is ready in the order in which it became so: a
tenant with hundreds of requests at once has all of them do a step before anybody else's does one.
This loop runs next what belongs to the tenant that has had the least time, and looks for what
became ready every few steps.

Whose a step is follows from its context, in which `whose` is set once a request's caller is known;
what the request starts inherits it.  All that is nobody's counts as one tenant more.

A request is a row of short steps, and waits between them for a thread or a machine.  If the loop
began a step of a busy tenant in each such gap, every gap would last as long as that step, and as
those of the threads that it wakes.  So while a tenant that has had less time is expected back
within milliseconds, steps of a tenant that always has more to do wait.  What the loop so leaves
unused counts as that tenant's time, in part, so that nobody holds up others for long.

A descriptor that waits to be read stays ready, so that every look would find it again.  So what
waits in the queue is muted until its step runs.  Alone that changed no time that was measured.

asyncio has no interface for the order of what is ready: the loop puts its own queue in the place of
`BaseEventLoop._ready`, of which asyncio uses `append`, `popleft`, `clear`, the length once before
it runs so many steps, and whether there is anything once before it waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from forkd.host.waiting import MutingSelector

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextvars import Context

    from forkd.host.waiting import Key
    from forkd.model.caller import Caller

whose: ContextVar[str] = ContextVar("whose", default="")
"""Whose what runs now is: a tenant's name, or `ADMIN`; empty for nobody's."""

ADMIN = "*"
"""Who may do anything, of whatever tenant; no tenant is called so."""

AT_ONCE = 4
"""Steps until what became ready meanwhile gets its turn.

A fork is some ten steps, each of which waits for an answer.  Beside a hostile tenant it took 75 ms
with 16 steps, 38 ms with 4 and 37 ms with 2 (14 ms alone)."""

SLICE = 2
"""Steps of one tenant until it is looked who has had the least time."""

OTHERS_S = 1.0
"""For how long after a step of another tenant the time is shared."""

EXPECTED_S = 0.005
"""How long after its last step a tenant is expected back, if it has had less time than others."""

AHEAD_S = 0.001
"""How much more time another has to have had than one that is expected, if it is to wait."""

BACKLOG_S = 0.01
"""How long a tenant has to have had something to do without a break, if it is to wait."""

WAITED_PRICE = 0.25
"""What the time costs a tenant for which the loop waits."""

LAST_STEP_PRICE = 0.5
"""What the time of a step costs a tenant that has nothing more to do then."""

KNOWN_MAX = 1_024
"""Most tenants of which it is known how much time they had; others begin where the least has."""


def whose_is(caller: Caller) -> str:
    """Return whose is what a caller asks for."""
    return ADMIN if caller.is_admin else caller.tenant


class FairSelector(MutingSelector):
    """Tells of a descriptor once, and again only when what has to be done about it has begun.

    Attributes:
        waiting: Of each handle that waits for its turn, its `id`.
        held_s: For how long nothing of that may begin.
        waited: Is told how long nothing began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: set[int] = set()
        self.held_s: Callable[[float], float] = lambda _: 0.0
        self.waited: Callable[[float], None] = lambda _: None
        self._muted: dict[int, int] = {}

    def select(self, timeout: float | None = None) -> list[tuple[Key, int]]:
        """Wait for descriptors of which it was not told yet.

        If everything that is ready is to wait for a tenant, so does this, and timers meanwhile.
        """
        began_s = time.perf_counter()
        held_s = self.held_s(began_s) if self.waiting else 0.0
        found = super().select(held_s or timeout)
        if held_s:
            self.waited(time.perf_counter() - began_s)
        return [each for each in found if self._is_new(each[0])] if self.waiting else found

    def _is_new(self, key: Key) -> bool:
        """Whether it was not told of before; a descriptor that was is muted."""
        for handle in key.data:
            if id(handle) in self.waiting:
                self._muted[id(handle)] = key.fd
                self.mute(key.fd)
                return False
        return True

    def begin(self, handle: asyncio.Handle) -> None:
        """Note that a handle no longer waits."""
        self.waiting.remove(id(handle))
        if self._muted and (fd := self._muted.pop(id(handle), None)) is not None:
            self.unmute(fd)

    def forget(self) -> None:
        """Note that no handle waits any more."""
        self.waiting.clear()
        for fd in self._muted.values():
            self.unmute(fd)
        self._muted.clear()


class FairQueue:
    """What is ready to run; in place of asyncio's deque.

    While one tenant alone has something to do, its steps are run as asyncio would: sharing takes
    more looks for what is ready.
    """

    def __init__(self, selector: FairSelector) -> None:
        self._selector = selector
        self._arrived: deque[asyncio.Handle] = deque()
        self._queues: dict[str, deque[asyncio.Handle]] = {}
        self._used_s: dict[str, float] = {}
        self._least_s = 0.0
        self._alone = False
        self._last = ""
        self._shared_until_s = 0.0
        self._slice = 0
        self._current = self._arrived
        self._running = ""
        self._began_s: float | None = None
        self._busy_since_s: dict[str, float] = {}
        self._expected_until_s: dict[str, float] = {}
        self._waits_for = ""
        selector.held_s, selector.waited = self._held_s, self._waited
        self.append = self._arrived.append  # of any thread, which a deque's is safe for

    def __bool__(self) -> bool:
        """Whether anything is ready; the last step has ended."""
        self._charge(time.perf_counter())
        self._began_s = None
        return bool(self._arrived) or bool(self._queues)

    def __len__(self) -> int:
        """Return how many steps to run now."""
        found, now_s = len(self._arrived), time.perf_counter()
        is_shared = bool(self._queues) or now_s < self._shared_until_s
        self._alone = not is_shared and self._begin_alone(now_s)
        if self._alone:
            self._expected_until_s.clear()
            return found
        for _ in range(found):
            handle = self._arrived.popleft()
            self._selector.waiting.add(id(handle))
            name = _whose(handle)
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = deque()
                self._begin(name, now_s)
                if name and name != self._last:
                    self._last, self._shared_until_s = name, now_s + OTHERS_S
            queue.append(handle)
        self._slice = 0
        if not self._queues or self._next(now_s) is None:
            return 0
        return min(len(self._selector.waiting), AT_ONCE)

    def popleft(self) -> asyncio.Handle:
        """Return the next step of whoever has had the least time."""
        if self._alone:
            return self._arrived.popleft()
        if not self._slice:
            now_s = time.perf_counter()
            self._charge(now_s)
            name = self._next(now_s)
            if name is None:
                self._began_s = None
                return NOTHING
            self._run(name, now_s)
            self._current = self._queues[name]
            self._slice = min(SLICE, len(self._current))
        self._slice -= 1
        handle = self._current.popleft()
        if not self._current:
            del self._queues[self._running]
        self._selector.begin(handle)
        return handle

    def clear(self) -> None:
        """Forget all that is ready."""
        self._arrived.clear()
        self._queues.clear()
        self._expected_until_s.clear()
        self._selector.forget()

    def _next(self, now_s: float) -> str | None:
        """Return whose step is next; None if all wait for a tenant that is expected.

        What is nobody's never waits: a tenant's request may depend on it.
        """
        name = min(self._queues, key=self._used_s.__getitem__)
        self._waits_for = self._comes_before(name, now_s) if name and self._expected_until_s else ""
        if not self._waits_for:
            return name
        return "" if "" in self._queues else None

    def _comes_before(self, name: str, now_s: float) -> str:
        """Return the tenant for which this one waits; empty if it need not."""
        if now_s - self._busy_since_s[name] < BACKLOG_S:
            return ""
        used_s = self._used_s[name] - AHEAD_S
        for each, until_s in tuple(self._expected_until_s.items()):
            if until_s <= now_s:
                del self._expected_until_s[each]
            elif self._used_s[each] < used_s:
                return each
        return ""

    def _held_s(self, now_s: float) -> float:
        if self._arrived or not self._queues or self._next(now_s) is not None:
            return 0.0
        return self._expected_until_s[self._waits_for] - now_s

    def _waited(self, time_s: float) -> None:
        self._used_s[self._waits_for] += time_s * WAITED_PRICE

    def _begin_alone(self, now_s: float) -> bool:
        """Begin if all that has arrived is nobody's, or of the tenant that had the last step."""
        names = set(map(_whose, tuple(self._arrived)))
        if names - {"", self._last}:
            return False
        name = self._last if self._last in names else ""
        self._begin(name, now_s)
        self._run(name, now_s)
        return True

    def _begin(self, name: str, now_s: float) -> None:
        """Have a tenant go on that had nothing to do: unless expected, it has saved up no time."""
        self._busy_since_s[name] = now_s
        if self._expected_until_s.pop(name, 0.0) < now_s:
            self._used_s[name] = max(self._used_s.get(name, 0.0), self._least_s)

    def _run(self, name: str, now_s: float) -> None:
        self._least_s = self._used_s[name]
        self._running, self._began_s = name, now_s

    def _charge(self, now_s: float) -> None:
        """Count what has just ended."""
        if self._began_s is None:
            return
        price = 1.0
        if self._running not in self._queues and not self._alone:
            price = LAST_STEP_PRICE
            if self._running:
                self._expected_until_s[self._running] = now_s + EXPECTED_S
        self._used_s[self._running] += (now_s - self._began_s) * price
        if len(self._used_s) > KNOWN_MAX + len(self._queues):
            self._used_s = {name: self._used_s[name] for name in self._queues}
            self._busy_since_s = {name: self._busy_since_s[name] for name in self._queues}
            self._expected_until_s.clear()


def _whose(handle: asyncio.Handle) -> str:
    context: Context = handle._context  # type: ignore[attr-defined]  # noqa: SLF001 - asyncio tells nobody
    return context.get(whose, "")


def _nothing() -> asyncio.Handle:
    handle = asyncio.Handle.__new__(asyncio.Handle)
    handle._cancelled = True  # noqa: SLF001 - all that asyncio asks of it
    return handle


NOTHING = _nothing()
"""Is run in the place of a step: a handle that was cancelled."""


class FairLoop(asyncio.SelectorEventLoop):
    """The loop."""

    def __init__(self) -> None:
        selector = FairSelector()
        super().__init__(selector)
        fair = FairQueue(selector)
        fair._arrived.extend(self._ready)  # type: ignore[has-type]  # noqa: SLF001
        self._ready = fair


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` in such a loop, as `asyncio.run` does in its own."""
    with asyncio.Runner(loop_factory=FairLoop) as runner:
        return runner.run(main)
