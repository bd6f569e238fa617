"""Measure everything once, on this machine: `python -m benchmarks.run --help`.

Standard output is one JSON object per line: `{"event":"progress","fraction","message"}`
as it goes, and `{"event":"result","bench":…}` or `{"event":"failed","code","message"}` at its end.
`python -m benchmarks` starts this where KVM works, and shows what it says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import (
    bed,
    branch,
    chain,
    clients,
    hogs,
    memory,
    pools,
    questions,
    recipes,
    tenants,
    tuning,
    walls,
)
from benchmarks.floor import Floor
from benchmarks.harness import (
    MIB,
    Json,
    available_mib,
    guest_faults,
    machine,
    median,
    private_mib,
    quantile,
    summary,
)
from benchmarks.teller import Teller, say
from forkd.errors import ForkdError
from forkd.host import proc

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forkd.model.ids import Tag
    from forkd.service.settings import HostSettings

REPEATS = {1: 10, 10: 5, 100: 5, 1000: 1}
"""How many rounds of each width a full run measures; one cold round comes before all."""

REPEATS_QUICK = {1: 5, 10: 2, 100: 2}
"""The same, when nobody wants to wait for a thousand."""

WIDTH = 100
"""The width that the budgets are stated for."""

PARTS = ("fork", "branch", "chain", "snapshot", "reset", "clients", "hogs", "tenants", "walls")
"""What can be measured by itself, in the order in which it is."""

APART = ("recipes", "executor", "memory", "host")
"""What is measured only if it is asked for."""

SMALL_PARTS = frozenset(
    {
        "fork",
        "branch",
        "chain",
        "reset",
        "clients",
        "hogs",
        "tenants",
        "walls",
        "executor",
        "memory",
        "host",
    }
)
LARGE_PARTS = frozenset({"branch", "snapshot"})
"""Which parts need a machine as the recipe has it, and which one with `LARGE_MIB`."""

LARGE_MIB = 2048
"""Memory of a machine of which a gigabyte is written to."""

FLOORS_OF_ONE = 3
"""Floor rounds beside one fork of one child: a single child's latency varies most."""


@dataclass(slots=True)
class Width:
    """What was measured of forks of one width."""

    n: int
    floor: Floor
    answered_ms: list[float] = field(default_factory=list)
    ready_ms: list[float] = field(default_factory=list)
    own_ms: list[float] = field(default_factory=list)
    first_eval_ms: list[float] = field(default_factory=list)
    first_eval_wall_ms: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    private_mib: list[float] = field(default_factory=list)
    taken_mib: list[float] = field(default_factory=list)
    faults_to_answer: list[int] = field(default_factory=list)
    faults_to_eval: list[int] = field(default_factory=list)

    def note(self, herd: bed.Herd) -> None:
        """Keep the times of a herd that nobody asked anything before all were ready."""
        self.answered_ms.append(herd.answered_ms)
        for child in herd.children:
            self.ready_ms.append(child.ready_ms)
            self.own_ms.append(child.times.total)
            for name in ("clone", "build", "resume", "agent"):
                stage_ms = getattr(child.times, name)
                self.stages.setdefault(name, []).append(stage_ms)

    def figures(self) -> Json:
        """Return what is kept of it."""
        wall_ms = median(self.answered_ms)
        return {
            "n": self.n,
            "answered": self.n,
            "rounds": len(self.answered_ms),
            "wall_ms": wall_ms,
            "ms_per_child": wall_ms / self.n,
            "p50_ms": quantile(self.ready_ms, 50),
            "p99_ms": quantile(self.ready_ms, 99),
            "child_p50_ms": quantile(self.own_ms, 50),
            "child_p99_ms": quantile(self.own_ms, 99),
            "stages_p50_ms": {name: median(times) for name, times in self.stages.items()},
            "floor_wall_ms": self.floor.wall_ms,
            "ratio_to_floor": wall_ms / self.floor.wall_ms,
            "first_eval": {
                **summary(self.first_eval_ms),
                "wall_ms": median(self.first_eval_wall_ms),
            },
            "memory": self.memory(),
            "guest_faults_p50": {
                "to_answer": median(self.faults_to_answer) if self.faults_to_answer else None,
                "to_first_eval": median(self.faults_to_eval) if self.faults_to_eval else None,
            },
        }

    def memory(self) -> Json:
        """Return what the children weighed, all alive after an evaluation in each."""
        return {
            "n": self.n,
            "private_mib_p50": quantile(self.private_mib, 50),
            "private_mib_p99": quantile(self.private_mib, 99),
            "mem_available_mib_per_child": median(self.taken_mib) / self.n,
        }


async def measure(host_bed: bed.Bed, width: Width, repeat: int, teller: Teller) -> None:
    """Run the rounds of one width; floor, answers and first evaluations take turns."""
    for number in range(1, repeat + 1):
        which = f"{width.n} children, round {number} of {repeat}"
        teller.begin(f"floor of {which}")
        await width.floor.round(FLOORS_OF_ONE if width.n == 1 else 1)
        teller.begin(f"fork of {which}")
        await teller.patiently(lambda: answered_round(host_bed, width))
        teller.begin(f"first eval of {which}")
        await teller.patiently(lambda: first_eval_round(host_bed, width))


async def answered_round(host_bed: bed.Bed, width: Width) -> None:
    """Fork, note the times, and weigh the children once each has evaluated something."""
    before_mib = available_mib()
    async with host_bed.fork(width.n) as herd:
        pids = [child.pid for child in herd.children]
        to_answer = known(guest_faults(pid) for pid in pids)
        await herd.ask_all(questions.numpy)
        width.taken_mib.append(before_mib - available_mib())
        width.private_mib += [private_mib(pid) for pid in pids]
        width.faults_to_answer += to_answer
        width.faults_to_eval += known(guest_faults(pid) for pid in pids)
        width.note(herd)


async def first_eval_round(host_bed: bed.Bed, width: Width) -> None:
    """Fork, and have each child evaluate something as soon as it is ready."""
    async with host_bed.fork(width.n, questions.numpy) as herd:
        await herd.ask_all(questions.numpy)
        width.first_eval_ms += [child.asked_ms or 0.0 for child in herd.children]
        width.first_eval_wall_ms.append(herd.asked_ms)


def known(values: Iterable[int | None]) -> list[int]:
    """Return those that could be found out."""
    return [value for value in values if value is not None]


async def bench(options: argparse.Namespace) -> Json:
    """Bake, measure what is asked for, and return all figures."""
    parts = frozenset(options.only)
    teller = Teller(steps(parts, quick=options.quick, names=options.recipes))
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    proc.raise_open_files_limit()
    programs = bed.Programs(options.vmm, options.agent, options.floor)
    with bed.settings(programs, options.cache, options.work) as host:
        figures: Json = {}
        async with contextlib.AsyncExitStack() as stack:
            # All are baked first: a service that starts ends zygotes that it does not know.
            baked = await bake_all(parts, options.recipe, host, teller)
            of_services: Json = {}
            if "clients" in parts:  # of a daemon, which has its own zygotes
                measured = clients.measure(host, bed.TAG, teller, quick=options.quick)
                of_services["clients"] = await measured
            if "hogs" in parts:
                of_services["hogs"] = await hogs.measure(host, bed.TAG, teller, quick=options.quick)
            if "tenants" in parts:
                measured = tenants.measure(host, bed.TAG, teller, quick=options.quick)
                of_services["tenants"] = await measured
            if "walls" in parts:
                of_services |= await walls.measure(host, bed.TAG, teller, quick=options.quick)
            if "memory" in parts:
                of_services |= await memory.measure(host, bed.TAG, teller, quick=options.quick)
            if "host" in parts:  # no zygote of ours may hold a machine meanwhile
                of_services |= await tuning.measure(baked[bed.TAG], teller, quick=options.quick)
            if "executor" in parts:
                of_services |= await asyncio.to_thread(
                    pools.measure, host, bed.TAG, teller, quick=options.quick
                )
            if "recipes" in parts:
                of_services["recipes"] = await recipes.measure(
                    host, teller, options.recipes, quick=options.quick
                )
            beds = {
                tag: await stack.enter_async_context(bed.zygote(each))
                for tag, each in baked.items()
            }
            for tag, each in baked.items():
                figures = figures or of_bake(each, beds[tag])
            small, large = beds.get(bed.TAG), beds.get(bed.LARGE_TAG)
            await measure_parts(Beds(options, teller, host, small, large), parts, figures)
            teller.begin("done")
    return {
        "version": 1,
        "started_at": started_at,
        "machine": machine(options.place),
        "rounds_repeated": teller.repeated,
        **figures,
        **of_services,
    }


@dataclass(frozen=True, slots=True)
class Beds:
    """What is measured on, and how."""

    options: argparse.Namespace
    teller: Teller
    host: HostSettings
    small: bed.Bed | None
    large: bed.Bed | None


async def measure_parts(beds: Beds, parts: frozenset[str], figures: Json) -> None:
    """Measure one part after the other; `figures` gets what they say."""
    options, teller, small, large = beds.options, beds.teller, beds.small, beds.large
    quick, floor = options.quick, options.floor
    if small is not None and "fork" in parts:
        figures |= await measure_forks(small, options, teller)
    if small is not None and large is not None and "branch" in parts:
        figures["branch"] = await branch.measure(small, large, floor, teller, quick=quick)
    if small is not None and "chain" in parts:
        figures["chain"] = await chain.measure_chain(small, beds.host, teller, quick=quick)
    if large is not None and "snapshot" in parts:
        taken = await chain.measure_durable(large, options.work, teller, quick=quick)
        figures["snapshot"] |= taken
    if small is not None and "reset" in parts:
        figures["reset"] = await chain.measure_reset(small, teller, quick=quick)


async def bake_all(
    parts: frozenset[str], recipe: Path, host: HostSettings, teller: Teller
) -> dict[Tag, bed.Baked]:
    """Bake what these parts are measured on; the recipe as it is comes first."""

    def tell(text: str) -> None:
        say({"event": "progress", "message": text})

    baked = {}
    if parts & SMALL_PARTS:
        teller.begin("bake")
        baked[bed.TAG] = await bed.bake(host, recipe, tell)
    if parts & LARGE_PARTS:
        teller.begin("bake with more memory")
        large = bed.resized(recipe, host.state_dir / "large", LARGE_MIB)
        baked[bed.LARGE_TAG] = await bed.bake(host, large, tell, bed.LARGE_TAG)
    return baked


def of_bake(baked: bed.Baked, host_bed: bed.Bed) -> Json:
    """Return what is kept of a bake, and of the zygote that was started on it."""
    return {
        "snapshot": {
            "recipe": baked.snapshot.recipe,
            "vcpus": baked.snapshot.vcpus,
            "memory_mib": baked.snapshot.memory_bytes // MIB,
            "stored_mib": baked.snapshot.stored_bytes / MIB,
        },
        "boot": {"ms": baked.stages_s.get("boot", 0.0) * 1e3},
        "bake": {"stages_s": baked.stages_s},
        "zygote": {"start_ms": host_bed.start_ms},
    }


async def measure_forks(host_bed: bed.Bed, options: argparse.Namespace, teller: Teller) -> Json:
    """Measure forks of every width, and round trips."""
    repeats = REPEATS_QUICK if options.quick else REPEATS
    teller.begin("round trips")
    async with host_bed.fork(1) as herd:  # also the cold round
        trips = await questions.round_trips(herd.children[0].guest)
    widths = [Width(n, Floor(options.floor, n)) for n in repeats]
    for width in widths:
        await measure(host_bed, width, repeats[width.n], teller)
    return {**assemble({width.n: width for width in widths}), **trips}


def steps(parts: frozenset[str], *, quick: bool, names: Iterable[str] = recipes.QUESTIONS) -> int:
    """Return how many steps a run of these parts, and of these recipes, tells of."""
    repeats = REPEATS_QUICK if quick else REPEATS
    return (
        1
        + sum(
            {
                "fork": 1 + 3 * sum(repeats.values()),
                "branch": (branch.QUICK if quick else branch.FULL).steps,
                "chain": (chain.QUICK if quick else chain.FULL).chain_steps,
                "snapshot": (chain.QUICK if quick else chain.FULL).durable_steps,
                "reset": (chain.QUICK if quick else chain.FULL).reset_steps,
                "clients": (clients.QUICK if quick else clients.FULL).rounds,
                "walls": (walls.QUICK if quick else walls.FULL).steps,
                "hogs": (hogs.QUICK if quick else hogs.FULL).steps,
                "tenants": (tenants.QUICK if quick else tenants.FULL).steps,
                "recipes": recipes.steps(tuple(names)),
                "executor": pools.STEPS,
                "host": (tuning.QUICK if quick else tuning.FULL).steps(),
                "memory": 1 + (memory.ROUNDS_QUICK if quick else memory.ROUNDS),
            }[part]
            for part in parts
        )
        + bool(parts & SMALL_PARTS)
        + bool(parts & LARGE_PARTS)
    )


def assemble(widths: dict[int, Width]) -> Json:
    """Lay out the figures of all widths, those with a budget under names of their own."""
    one, hundred = widths[1], widths[WIDTH]
    floor_of_one_ms = median(one.floor.children_ms)
    figures: Json = {
        "floor": hundred.floor.figures() | {"one_child_ms": floor_of_one_ms},
        "fork": hundred.figures(),
        "first_eval": summary(one.first_eval_ms)
        | {"ratio_to_floor": median(one.first_eval_ms) / floor_of_one_ms},
        "memory": hundred.memory(),
        "forks": [width.figures() for width in widths.values()],
    }
    if 1000 in widths:  # noqa: PLR2004 - the name of the key below
        thousand = widths[1000].figures()
        ratio = thousand["ms_per_child"] / figures["fork"]["ms_per_child"]
        figures["fork_1000"] = {
            "answered": thousand["answered"],
            "ms_per_child": thousand["ms_per_child"],
            "ratio_to_100": ratio,
            "private_mib_p50": thousand["memory"]["private_mib_p50"],
        }
    return figures


def parse_parts(text: str) -> tuple[str, ...]:
    """Read names of parts, separated by commas.

    Raises:
        argparse.ArgumentTypeError: One is no part.
    """
    chosen = tuple(text.split(","))
    for part in chosen:
        if part not in {*PARTS, *APART}:
            known = ", ".join((*PARTS, *APART))
            raise argparse.ArgumentTypeError(f"{part!r} is none of {known}")
    return chosen


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    for name in ("vmm", "agent", "floor", "cache", "recipe", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--place", default="this host", help="what to call this machine")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no thousand")
    parser.add_argument("--only", type=parse_parts, default=PARTS, help="parts, with commas")
    parser.add_argument("--recipes", type=recipes.parse_names, default=recipes.everything())
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    try:
        figures = asyncio.run(bench(parse(arguments)))
    except ForkdError as error:
        say({"event": "failed", "code": error.code, "message": str(error)})
        return 1
    say({"event": "result", "bench": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
