"""What walls cost a fork: the jail with its filters, the cgroup, and a network of its own.

The same snapshot is forked by hosts that differ in nothing but their walls, in turn, and what is
measured is all that a user waits for: from the request to the service until every child is ready.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.harness import Json, Stopwatch, median
from benchmarks.hogs import CALLER, FORK_DEADLINE_S, forked
from forkd.limits import UIDS_DEFAULT
from forkd.model.network import HOST
from forkd.model.sandbox import ForkOptions
from forkd.service.host import open_host
from forkd.service.jail import UidRange

if TYPE_CHECKING:
    from benchmarks.teller import Teller
    from forkd.model.ids import Tag
    from forkd.service.settings import HostSettings

WIDTH = 100
"""Children of a fork."""

PLAIN = ForkOptions(deadline_s=FORK_DEADLINE_S, all_or_nothing=True)
LINKED = replace(PLAIN, network=HOST)


@dataclass(frozen=True, slots=True)
class Plan:
    """How many forks are measured of each kind."""

    rounds: int

    @property
    def steps(self) -> int:
        """How many steps are told of."""
        return self.rounds


FULL = Plan(rounds=5)
QUICK = Plan(rounds=2)


async def measure(settings: HostSettings, tag: Tag, teller: Teller, *, quick: bool) -> Json:
    """Fork `WIDTH` children without walls, with jail and cgroup, and with a network besides.

    Raises:
        ForkdError: A child did not become ready.
    """
    plan = QUICK if quick else FULL
    bare = replace(settings, cgroups=False, uids=None, filtered=False)
    walled = replace(settings, cgroups=True, uids=UidRange.parse(UIDS_DEFAULT))
    kinds = {"bare": (bare, PLAIN), "walled": (walled, PLAIN), "linked": (walled, LINKED)}
    taken_ms: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(1, plan.rounds + 1):
        teller.begin(f"walls of {WIDTH} children, round {number} of {plan.rounds}")
        for name, (host, options) in kinds.items():
            taken_ms[name].append(await _fork(host, tag, options))
    return lay_out(taken_ms)


def lay_out(taken_ms: dict[str, list[float]]) -> Json:
    """Return what is kept of the times that each kind of fork took."""
    medians = {name: median(times) for name, times in taken_ms.items()}
    return {
        "walls": {
            "n": WIDTH,
            "rounds": len(taken_ms["bare"]),
            "wall_ms": medians,
            "all_ms": taken_ms,
        },
        "jail": {"ratio": medians["walled"] / medians["bare"]},
        "network": {"ratio": medians["linked"] / medians["walled"]},
    }


async def _fork(settings: HostSettings, tag: Tag, options: ForkOptions) -> float:
    """Fork from a zygote that has been forked from once; return how long it took, in ms."""
    async with open_host(settings) as host:
        async with forked(host, tag, replace(options, all_or_nothing=False), 1):
            pass
        clock = Stopwatch()
        result = await host.sandboxes.fork(CALLER, tag, WIDTH, options)
        took_ms = clock.ms()
        await host.sandboxes.delete_all(each.id for each in result.sandboxes)
    return took_ms
