"""Branches of a running machine: its pause, its siblings, and what its guest notices.

Two beds: one of the recipe as it is, and a *large* one with memory enough to dirty a gigabyte.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.floor import Floor, probe
from benchmarks.harness import MIB, Json, median, quantile
from forkd.errors import EngineError
from forkd.host import proc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from benchmarks.bed import Bed, Child
    from benchmarks.teller import Teller

DIRTY_MIB = (16, 256, 1024)
"""How much of its memory a machine writes to without end while it is branched."""

LARGE_FROM_MIB = 512
"""From so much on it is the large machine's memory; below, the recipe's machine has room."""

WIDTH = 100
"""Siblings of one branch, for the figure that has a budget."""

PAGE_BYTES = 1 << 12

DIRTY = """
import threading, time


def sweep():
    global sweeps
    while going:
        numpy.add(pages, 1, out=pages)
        sweeps += 1


room = numpy.zeros({mib} << 20, dtype="u1")[::4096]
pages, sweeps, going = room[:1], 0, True
threading.Thread(target=sweep, daemon=True).start()
"""
"""Writes to one byte of every page, over and over, as the probe does."""

GROW = "pages = room[:len(pages) + {count}]"
"""Has it write to so many pages more."""

SWEPT = """
until = sweeps + 2
while sweeps < until:
    time.sleep(0.001)
"""
"""Returns when every page has been written to since it was asked."""

WATCH = """
import threading, time
gaps, watching = [], True


def watch():
    before = time.monotonic_ns()
    while watching:
        now = time.monotonic_ns()
        if now - before > 100_000:
            gaps.append((before, now - before))
        before = now


threading.Thread(target=watch, daemon=True).start()
"""
"""Reads the clock without end, and keeps what lies more than 0.1 ms apart."""

MARK = "mark = time.monotonic_ns()"

LONGEST = """
while time.monotonic_ns() < mark + 1_000_000_000:
    time.sleep(0.01)
max((gap for began, gap in gaps if mark <= began < mark + 1_000_000_000), default=0)
"""
"""The longest gap of the second after the mark, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """How many rounds of each kind; a cold one comes before.

    Attributes:
        pause: For each of `DIRTY_MIB`.  One of a gigabyte takes a minute where KVM is emulated.
    """

    pause: tuple[int, ...]
    sibling: int
    wide: int
    stall: int

    @property
    def steps(self) -> int:
        """How many steps a teller is told of."""
        return sum(self.pause) + len(self.pause) + self.sibling + self.wide + self.stall


FULL = Repeats(pause=(15, 9, 3), sibling=20, wide=4, stall=20)
QUICK = Repeats(pause=(5, 3, 1), sibling=5, wide=1, stall=4)


@dataclass(slots=True)
class Pauses:
    """How long machines were paused that wrote to so much memory.

    Attributes:
        own_mib: How much of its memory the machine had to itself in the end: what was dirty.
    """

    dirty_mib: int
    own_mib: float = 0.0
    ours_ms: list[float] = field(default_factory=list)
    probe_ms: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Ours, in the probe's."""
        return median(self.ours_ms) / median(self.probe_ms)


@dataclass(slots=True)
class Siblings:
    """When siblings had answered, from the request to branch on."""

    floor_of_one: Floor
    floor_of_many: Floor
    one_ms: list[float] = field(default_factory=list)
    pauses_ms: list[float] = field(default_factory=list)
    listening_ms: list[float] = field(default_factory=list)
    many_ms: list[float] = field(default_factory=list)

    def figures(self) -> Json:
        """Return what is kept of them."""
        floor_ms = median(self.floor_of_one.children_ms)
        one_ms, many_ms = median(self.one_ms), median(self.many_ms)
        return {
            "sibling_answered_ms": one_ms,
            "sibling_answered_p99_ms": quantile(self.one_ms, 99),
            "sibling_ratio_to_floor": one_ms / floor_ms,
            "seed_listening_ms": median(self.listening_ms),
            "idle_pause_ms": median(self.pauses_ms),
            "n100_wall_ms": many_ms,
            "n100_ratio_to_floor": many_ms / self.floor_of_many.wall_ms,
            "floor_one_child_ms": floor_ms,
            "floor_n100_wall_ms": self.floor_of_many.wall_ms,
        }


@dataclass(slots=True)
class Stalls:
    """The longest gaps that loops in guests saw within a second."""

    branched_ms: list[float] = field(default_factory=list)
    alone_ms: list[float] = field(default_factory=list)

    def figures(self) -> Json:
        """Return what is kept of them."""
        return {
            "guest_stall_ms_p99": quantile(self.branched_ms, 99),
            "guest_stall_ms_p50": quantile(self.branched_ms, 50),
            "guest_stall_unbranched_ms_p99": quantile(self.alone_ms, 99),
        }


async def pauses(
    bed: Bed, large: Bed, floor: Path, repeats: Repeats, teller: Teller
) -> list[Pauses]:
    """Branch machines and probes in turns, at every size."""
    taken = [Pauses(mib) for mib in DIRTY_MIB]
    for size, rounds in zip(taken, repeats.pause, strict=True):
        home = bed if size.dirty_mib < LARGE_FROM_MIB else large
        async with (
            home.fork(1) as herd,
            probe(floor, size.dirty_mib) as bare,
        ):
            source = herd.children[0]
            teller.begin(f"branch of {size.dirty_mib} MiB dirty, round 0 of {rounds}")
            await dirty(home, source, size.dirty_mib)
            await bare.round()
            for number in range(1, rounds + 1):
                teller.begin(f"branch of {size.dirty_mib} MiB dirty, round {number} of {rounds}")
                size.ours_ms.append(await pause_of(home, source))
                await bare.round()
            size.own_mib = proc.anonymous_bytes(source.pid) / MIB
        size.probe_ms = bare.pauses_ms[1:]
    return taken


async def dirty(bed: Bed, source: Child, mib: int) -> None:
    """Have a machine write without end to its memory, until `mib` of that are its own.

    It has some when it has only been asked to, and more when it has been branched: the kernel's and
    the interpreter's, and its process's.  They count.

    Raises:
        EngineError: There are more of those already.
    """
    await source.value(DIRTY.format(mib=mib))
    await pause_of(bed, source)
    # In ever smaller steps, because growing takes some as well.
    for share in (2, 2, 2, 1):
        own = proc.anonymous_bytes(source.pid)
        count = (mib * MIB - own) // PAGE_BYTES // share
        if count < 1:
            raise EngineError(f"{own} bytes are dirty before {mib} MiB are to be")
        async with running(source):
            await source.value(GROW.format(count=count))
        await pause_of(bed, source)


async def pause_of(bed: Bed, source: Child) -> float:
    """Branch a machine that writes to its memory; it is paused before and after.

    The seed lives until every page has been copied, and the probe's child as well: a page is in
    small pages then, as it is wherever siblings live on.
    """
    async with running(source):
        await source.value(SWEPT)
        async with bed.branch(source) as seed:
            await source.value(SWEPT)
            return seed.pause_ms


@contextlib.asynccontextmanager
async def running(source: Child) -> AsyncIterator[None]:
    """Let a machine run within the block only, so that it leaves the processors to others."""
    with source.explained():
        async with await source.control() as control:
            await control.resume()
            yield
            await control.pause()


async def siblings(bed: Bed, floor: Path, repeats: Repeats, teller: Teller) -> Siblings:
    """Branch an idle machine into one and into many, in turns with the floor."""
    taken = Siblings(Floor(floor, 1), Floor(floor, WIDTH))
    async with bed.fork(1) as herd:
        source = herd.children[0]
        await one_sibling(bed, source)  # cold
        for number in range(1, repeats.sibling + 1):
            teller.begin(f"branch into one, round {number} of {repeats.sibling}")
            await taken.floor_of_one.round()
            await teller.patiently(lambda: note_one(bed, source, taken))
        for number in range(1, repeats.wide + 1):
            teller.begin(f"branch into {WIDTH}, round {number} of {repeats.wide}")
            await taken.floor_of_many.round()
            await teller.patiently(lambda: note_many(bed, source, taken))
    return taken


async def note_one(bed: Bed, source: Child, taken: Siblings) -> None:
    """Branch a machine into one sibling, and keep the times."""
    answered_ms, listening_ms, pause_ms = await one_sibling(bed, source)
    taken.one_ms.append(answered_ms)
    taken.listening_ms.append(listening_ms)
    taken.pauses_ms.append(pause_ms)


async def one_sibling(bed: Bed, source: Child, n: int = 1) -> tuple[float, float, float]:
    """Branch; return when the last sibling had answered, when the seed listened, and the pause."""
    async with bed.branch(source) as seed, seed.fork(n) as herd:
        return seed.start_ms + herd.answered_ms, seed.start_ms, seed.pause_ms


async def note_many(bed: Bed, source: Child, taken: Siblings) -> None:
    """Branch a machine into many siblings, and keep the time."""
    answered_ms, _, _ = await one_sibling(bed, source, WIDTH)
    taken.many_ms.append(answered_ms)


async def stalls(bed: Bed, repeats: Repeats, teller: Teller) -> Stalls:
    """Have a loop in a guest watch its clock, while it is branched and while it is not."""
    taken = Stalls()
    async with bed.fork(1) as herd:
        source = herd.children[0]
        await source.value(WATCH)
        for number in range(1, repeats.stall + 1):
            teller.begin(f"a guest's stall, round {number} of {repeats.stall}")
            taken.alone_ms.append(await longest_gap(source))
            await source.value(MARK)
            await one_sibling(bed, source)
            taken.branched_ms.append(_ms(await source.value(LONGEST)))
    return taken


async def longest_gap(source: Child) -> float:
    """Return the longest gap of a second in which nothing is asked of a machine."""
    await source.value(MARK)
    return _ms(await source.value(LONGEST))


def _ms(nanoseconds: Any) -> float:  # noqa: ANN401 - JSON
    return float(nanoseconds) / 1e6


async def measure(bed: Bed, large: Bed, floor: Path, teller: Teller, *, quick: bool) -> Json:
    """Measure all there is of branches, and lay it out."""
    repeats = QUICK if quick else FULL
    sizes = await pauses(bed, large, floor, repeats, teller)
    born = await siblings(bed, floor, repeats, teller)
    noticed = await stalls(bed, repeats, teller)
    return lay_out(sizes, born, noticed)


def lay_out(sizes: list[Pauses], born: Siblings, noticed: Stalls) -> Json:
    """Return the figures under their names."""
    ratios = {str(size.dirty_mib): size.ratio for size in sizes}
    return {
        "pause_ms": {str(size.dirty_mib): median(size.ours_ms) for size in sizes},
        "probe_pause_ms": {str(size.dirty_mib): median(size.probe_ms) for size in sizes},
        "pause_ms_all": {str(size.dirty_mib): size.ours_ms for size in sizes},
        "probe_pause_ms_all": {str(size.dirty_mib): size.probe_ms for size in sizes},
        "own_mib": {str(size.dirty_mib): size.own_mib for size in sizes},
        "ratio_to_probe": {**ratios, "worst": max(ratios.values())},
        **born.figures(),
        **noticed.figures(),
    }
