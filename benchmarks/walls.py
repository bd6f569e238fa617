"""What walls cost a fork: the jail with its filters, the cgroup, and a network of its own.

The same snapshot is forked by hosts that differ in nothing but their walls, in turn, and what is
measured is all that a user waits for: from the request to the service until every child is ready,
and from there until every one has answered its first question, since a dormant guest puts its
network on before that (ADR 0038).  What a slot costs on the host alone, without what its guest does
with it, is measured apart.  At the end a thousand with a network each are alive at once, and every
one is asked something.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.harness import Json, Stopwatch, median, summary
from benchmarks.hogs import CALLER, FORK_DEADLINE_S, asked, forked
from forkd.limits import NETWORK_SLOTS_DEFAULT, UIDS_DEFAULT
from forkd.model.ids import new_sandbox_id
from forkd.model.network import HOST
from forkd.model.sandbox import ForkOptions
from forkd.service.host import open_host
from forkd.service.jail import UidRange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.teller import Teller
    from forkd.model.ids import Tag
    from forkd.model.sandbox import Sandbox
    from forkd.service.host import Host
    from forkd.service.settings import HostSettings

WIDTH = 100
"""Children of a fork."""

POLL_S = 0.05

PLAIN = ForkOptions(deadline_s=FORK_DEADLINE_S, all_or_nothing=True)
LINKED = replace(PLAIN, network=HOST)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        rounds: How many forks of each kind.
        alive: How many sandboxes with a network are to be alive at once; 0 for none.
    """

    rounds: int
    alive: int = 0

    @property
    def steps(self) -> int:
        """How many steps are told of."""
        return self.rounds + self.alive // WIDTH


FULL = Plan(rounds=5, alive=1_000)
QUICK = Plan(rounds=3)


async def measure(settings: HostSettings, tag: Tag, teller: Teller, *, quick: bool) -> Json:
    """Fork `WIDTH` children without walls, with jail and cgroup, and with a network besides.

    Raises:
        ForkdError: A child did not become ready.
    """
    plan = QUICK if quick else FULL
    bare = replace(settings, cgroups=False, uids=None, filtered=False)
    walled = replace(settings, cgroups=True, uids=UidRange.parse(UIDS_DEFAULT))
    ready = replace(walled, network_slots=NETWORK_SLOTS_DEFAULT)
    kinds = {"bare": (bare, PLAIN), "walled": (walled, PLAIN), "linked": (ready, LINKED)}
    taken_ms: dict[str, list[float]] = {name: [] for name in kinds}
    first_ms: dict[str, list[float]] = {name: [] for name in kinds}
    slots_ms: list[float] = []
    for number in range(1, plan.rounds + 1):
        teller.begin(f"walls of {WIDTH} children, round {number} of {plan.rounds}")
        for name, (host, options) in kinds.items():
            async with _forked_once(host, tag, options) as service:
                fork_ms, answers_ms = await _fork(service, tag, options)
                taken_ms[name].append(fork_ms)
                first_ms[name].append(answers_ms)
                if options.network is not None:
                    slots_ms.append(await _take_slots(service))
    crowd_ms = await _crowd(ready, tag, plan.alive, teller) if plan.alive else None
    return lay_out(taken_ms, first_ms, slots_ms, crowd_ms)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Sandboxes with a network each, all alive at once.

    Attributes:
        forked_ms: How long each fork of `WIDTH` of them took.
        answered_ms: How long each took to answer when all were there.
    """

    forked_ms: list[float]
    answered_ms: list[float]


def lay_out(
    taken_ms: dict[str, list[float]],
    first_ms: dict[str, list[float]],
    slots_ms: list[float],
    crowd: Crowd | None = None,
) -> Json:
    """Return what is kept of the times of each kind of fork, of slots, and of the crowd.

    Args:
        taken_ms: How long forks of each kind took, by round.
        first_ms: How long the first answers of their children took, one after the other.
        slots_ms: How long the slots of a fork took.
        crowd: What the crowd took.
    """
    medians = {name: median(times) for name, times in taken_ms.items()}
    used = {
        name: median([sum(both) for both in zip(times, first_ms[name], strict=True)])
        for name, times in taken_ms.items()
    }
    slots = median(slots_ms)
    figures: Json = {
        "walls": {
            "n": WIDTH,
            "rounds": len(taken_ms["bare"]),
            "wall_ms": medians,
            "all_ms": taken_ms,
            "first_ms": first_ms,
            "ratio": medians["linked"] / medians["bare"],
            "used_ratio": used["linked"] / used["bare"],
        },
        "jail": {"ratio": medians["walled"] / medians["bare"]},
        "network": {
            "ratio": medians["linked"] / medians["walled"],
            "used_ratio": used["linked"] / used["walled"],
        },
        "slots": {
            "ms_per_child": slots / WIDTH,
            "of_fork": slots / medians["walled"],
            "all_ms": slots_ms,
        },
        "host": {"ratio": (medians["walled"] + slots) / medians["bare"]},
    }
    if crowd is not None:
        figures["network_1000"] = {
            "alive": len(crowd.answered_ms),
            "ms_per_child": sum(crowd.forked_ms) / len(crowd.answered_ms),
            "last_to_first": crowd.forked_ms[-1] / crowd.forked_ms[0],
            "forked_ms": crowd.forked_ms,
            "eval": summary(crowd.answered_ms),
        }
    return figures


@contextlib.asynccontextmanager
async def _forked_once(
    settings: HostSettings, tag: Tag, options: ForkOptions
) -> AsyncIterator[Host]:
    """Give a host whose zygote has been forked from once."""
    async with open_host(settings) as host:
        async with forked(host, tag, replace(options, all_or_nothing=False), 1):
            pass
        yield host


async def _fork(host: Host, tag: Tag, options: ForkOptions) -> tuple[float, float]:
    """Fork and end them; return how long the fork took, and the first answers of all, in ms."""
    await _slots_made(host)
    clock = Stopwatch()
    result = await host.sandboxes.fork(CALLER, tag, WIDTH, options)
    took_ms = clock.ms()
    first_ms = await asked(host, result.sandboxes, 1)
    await host.sandboxes.delete_all(each.id for each in result.sandboxes)
    return took_ms, sum(first_ms)


async def _take_slots(host: Host) -> float:
    """Return how long `WIDTH` sandboxes take to get a network slot each, walls included, in ms.

    That is how much longer all that they hold of the host takes than without.
    """
    taken_ms = []
    leases = host.sandboxes.leases
    for network in (None, HOST):
        await _slots_made(host)
        clock = Stopwatch()
        taken = leases.reserve([new_sandbox_id() for _ in range(WIDTH)], network)
        failed = await leases.acquire(taken, None)
        taken_ms.append(clock.ms())
        failed |= await leases.release(taken)
        for error in failed.values():
            raise error
    without_ms, with_ms = taken_ms
    return with_ms - without_ms


async def _slots_made(host: Host) -> None:
    """Return when the network slots that are made ahead of need have been made."""
    while host.figures.slots.is_filling:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(POLL_S)


async def _crowd(settings: HostSettings, tag: Tag, alive: int, teller: Teller) -> Crowd:
    """Fork until so many sandboxes are alive, and ask each of them.

    Raises:
        EngineError: One did not become ready, or answered wrongly.
    """
    forked_ms: list[float] = []
    sandboxes: list[Sandbox] = []
    async with open_host(settings) as host, contextlib.AsyncExitStack() as stack:
        while len(sandboxes) < alive:
            teller.begin(f"{len(sandboxes) + WIDTH} of {alive} with a network each")
            clock = Stopwatch()
            more = await stack.enter_async_context(forked(host, tag, LINKED, WIDTH))
            forked_ms.append(clock.ms())
            sandboxes += more
        return Crowd(forked_ms, await asked(host, tuple(sandboxes), 1))
