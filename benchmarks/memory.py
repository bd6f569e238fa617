"""What a sandbox takes of its host's memory, and of which kind.

The service forks a hundred, jailed and each in its cgroup, and all of them evaluate something.
What the kernel then counts more than before is divided by their number.  Some of it grows with the
number of processors that the host may have: `make bench ARGS='--only memory --possible-cpus 128'`
has the helper machine's kernel make room for 128.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Json, median
from benchmarks.hogs import FORK_DEADLINE_S, asked, forked
from forkd.limits import UIDS_DEFAULT
from forkd.model.sandbox import ForkOptions
from forkd.service.host import open_host
from forkd.service.jail import UidRange

if TYPE_CHECKING:
    from benchmarks.teller import Teller
    from forkd.model.ids import Tag
    from forkd.service.settings import HostSettings

WIDTH = 100
"""Children of a round."""

ROUNDS = 5
ROUNDS_QUICK = 2

PLAIN = ForkOptions(deadline_s=FORK_DEADLINE_S, all_or_nothing=True)

KINDS = {
    "available": "MemAvailable",
    "anonymous": "AnonPages",
    "per_cpu": "Percpu",
    "slab": "SUnreclaim",
    "page_tables": "PageTables",
    "kernel_stacks": "KernelStack",
}
"""What is kept, by the kernel's names in `/proc/meminfo`."""


async def measure(settings: HostSettings, tag: Tag, teller: Teller, *, quick: bool) -> Json:
    """Weigh `WIDTH` children, again and again.

    Raises:
        ForkdError: A child did not become ready.
    """
    rounds = ROUNDS_QUICK if quick else ROUNDS
    walled = replace(settings, cgroups=True, uids=UidRange.parse(UIDS_DEFAULT))
    taken: list[dict[str, float]] = []
    async with open_host(walled) as host:
        for number in range(rounds + 1):
            teller.begin(f"memory of {WIDTH} children, round {number} of {rounds}")
            before = meminfo()
            async with forked(host, tag, PLAIN, WIDTH) as children:
                await asked(host, children, 1)
                taken.append(per_child(before, meminfo(), WIDTH))
    return {"host_memory": lay_out(taken[1:])}  # the first round fills the kernel's caches


def meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Return what the kernel says of memory, in KiB."""
    fields = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {field[0].removesuffix(":"): int(field[1]) for field in fields}


def per_child(before: dict[str, int], after: dict[str, int], count: int) -> dict[str, float]:
    """Return by how many KiB each kind has grown for each of `count`; available memory shrinks."""
    grown = {kind: (after[name] - before[name]) / count for kind, name in KINDS.items()}
    return grown | {"available": -grown["available"]}


def lay_out(rounds: list[dict[str, float]]) -> Json:
    """Return the medians of all rounds, and how many processors the kernel has made room for."""
    return {
        "n": WIDTH,
        "rounds": len(rounds),
        "possible_cpus": possible_cpus(),
        "kib_per_child": {kind: median([each[kind] for each in rounds]) for kind in KINDS},
    }


def possible_cpus(path: Path = Path("/sys/devices/system/cpu/possible")) -> int:
    """Return for how many processors the kernel has made room: `0` or `0-127` is in the file."""
    return int(path.read_text(encoding="ascii").strip().rpartition("-")[2]) + 1
