"""Chains, snapshots of running machines, and resets."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bed import zygote_of
from benchmarks.harness import MIB, Json, Stopwatch, median, quantile
from forkd.engine.configs import Identity

if TYPE_CHECKING:
    from benchmarks.bed import Bed, Child
    from benchmarks.teller import Teller
    from forkd.service.settings import HostSettings

DEPTH = 8
"""Links between the deepest zygote and its base."""

LINK_MIB = 8
"""What each link adds, in memory and on disk."""

DURABLE_MIB = (7, 121, 1024)
"""How much of its memory a machine has written to that is snapshotted."""

RESET_DEADLINE_S = 600.0

TICKS_MS = 20
"""Some ticks of a kernel, whatever its HZ of 100, 250, 300 or 1,000."""

ADD = """
import os
added = globals().get("added", []) + [numpy.full({mib} << 20, {value}, dtype="u1")]
with open("/root/link-{value}", "wb") as file:
    file.write(added[-1].tobytes())
os.sync()
"""
"""Dirties memory and disk, with what is not zero."""

FILL = "memory = numpy.full({mib} << 20, 7, dtype='u1')"


@dataclass(frozen=True, slots=True)
class Repeats:
    """How many rounds of each kind; a cold one comes before."""

    chain: int
    durable: int
    reset: int
    cold: int = 1

    @property
    def chain_steps(self) -> int:
        """How many steps a teller is told of."""
        return DEPTH + self.cold + self.chain

    @property
    def durable_steps(self) -> int:
        """As above."""
        return len(DURABLE_MIB) * self.durable

    @property
    def reset_steps(self) -> int:
        """As above."""
        return self.reset + 1


FULL = Repeats(chain=30, durable=3, reset=30)
QUICK = Repeats(chain=8, durable=1, reset=8)


@dataclass(slots=True)
class Depths:
    """When a child had answered, forked from the base's zygote and from the deepest.

    Attributes:
        whole_ms: The same of the deepest link's instant, stored without a parent.
    """

    shallow_ms: list[float] = field(default_factory=list)
    deep_ms: list[float] = field(default_factory=list)
    whole_ms: list[float] = field(default_factory=list)
    links_mib: float = 0.0

    def figures(self) -> Json:
        """Return what is kept of them."""
        shallow_ms, deep_ms = median(self.shallow_ms), median(self.deep_ms)
        whole_ms = median(self.whole_ms)
        return {
            "depth_0_ms": shallow_ms,
            f"depth_{DEPTH}_ms": deep_ms,
            "ratio": deep_ms / shallow_ms,
            "whole_ms": whole_ms,
            "ratio_to_whole": deep_ms / whole_ms,
            "depth_0_ms_all": self.shallow_ms,
            f"depth_{DEPTH}_ms_all": self.deep_ms,
            "links_mib": self.links_mib,
        }


async def measure_chain(bed: Bed, host: HostSettings, teller: Teller, *, quick: bool) -> Json:
    """Fork one child from the base, one from a chain, one from that instant stored whole."""
    repeats = QUICK if quick else FULL
    taken = Depths()
    async with contextlib.AsyncExitStack() as stack:
        folder = tempfile.TemporaryDirectory(prefix="chain-", dir=host.state_dir)
        store = Path(stack.enter_context(folder))
        whole = store / "whole"
        whole.mkdir()
        deepest = bed
        for depth in range(1, DEPTH + 1):
            teller.begin(f"link {depth} of {DEPTH}")
            link = store / str(depth)
            link.mkdir()
            async with deepest.fork(1) as herd:
                await herd.children[0].value(ADD.format(mib=LINK_MIB, value=depth))
                # As the base was left before its instant: depths are compared, not instants.
                herd.children[0].guest.close()
                await asyncio.sleep(host.settle_s)
                async with deepest.branch(herd.children[0]) as seed:
                    taken.links_mib += await seed.save(link) / MIB
                    if depth == DEPTH:
                        await seed.save(whole, whole=True)
            deepest = await stack.enter_async_context(deepest.derive(link))
        rootfs = bed.disk.layers[0]
        flat = await stack.enter_async_context(zygote_of(host, whole, rootfs, bed.disk.size_bytes))
        for number in range(repeats.cold + repeats.chain):
            teller.begin(f"fork at depth 0 and {DEPTH}, round {number} of {repeats.chain}")
            shallow_ms, deep_ms = await answered_ms(bed), await answered_ms(deepest)
            whole_ms = await answered_ms(flat)
            if number >= repeats.cold:
                taken.shallow_ms.append(shallow_ms)
                taken.deep_ms.append(deep_ms)
                taken.whole_ms.append(whole_ms)
    return taken.figures()


async def answered_ms(bed: Bed) -> float:
    """Fork one child, at any part of the host's tick, and return when it had answered.

    A fork waits for a grace period, which ends with a tick, and so does the end of the
    child before. Rounds that all began there would differ by whole ticks or by nothing.
    """
    await asyncio.sleep(secrets.randbelow(TICKS_MS) / 1_000)
    async with bed.fork(1) as herd:
        return herd.answered_ms


async def measure_durable(large: Bed, work: Path, teller: Teller, *, quick: bool) -> Json:
    """Snapshot machines that have written to so much memory, until that is on disk."""
    repeats = QUICK if quick else FULL
    durable_ms, stored_mib = {}, {}
    for mib in DURABLE_MIB:
        times: list[float] = []
        async with large.fork(1) as herd:
            source = herd.children[0]
            await source.value(FILL.format(mib=mib))
            for number in range(1, repeats.durable + 1):
                teller.begin(f"snapshot of {mib} MiB dirty, round {number} of {repeats.durable}")
                with tempfile.TemporaryDirectory(prefix="snapshot-", dir=work) as folder:
                    clock = Stopwatch()
                    async with large.branch(source) as seed:
                        stored_mib[str(mib)] = await seed.save(Path(folder)) / MIB
                        times.append(clock.ms())
        durable_ms[str(mib)] = median(times)
    return {"durable_ms": durable_ms, "durable_stored_mib": stored_mib}


async def measure_reset(bed: Bed, teller: Teller, *, quick: bool) -> Json:
    """Reset a machine and fork another, in turns."""
    repeats = QUICK if quick else FULL
    resets_ms: list[float] = []
    forks_ms: list[float] = []
    async with bed.fork(1) as herd:
        for number in range(repeats.reset + 1):
            teller.begin(f"reset and fork, round {number} of {repeats.reset}")
            reset_ms, fork_ms = await reset(herd.children[0]), await answered_ms(bed)
            if number > 0:  # the first round is cold
                resets_ms.append(reset_ms)
                forks_ms.append(fork_ms)
    return reset_figures(resets_ms, forks_ms)


def reset_figures(resets_ms: list[float], forks_ms: list[float]) -> Json:
    """Return what is kept of resets, and of the forks between them."""
    return {
        "p50_ms": quantile(resets_ms, 50),
        "p99_ms": quantile(resets_ms, 99),
        "fork_p50_ms": quantile(forks_ms, 50),
        "ms_all": resets_ms,
        "fork_ms_all": forks_ms,
        "ratio_to_fork": quantile(resets_ms, 50) / quantile(forks_ms, 50),
    }


async def reset(child: Child) -> float:
    """Take a machine that has computed something back to its fork point; return the time."""
    await child.value("numpy.arange(1000).sum().item()")
    child.guest.close()
    identity = Identity("again", secrets.token_hex(16), str(uuid.uuid4()))
    async with await child.control() as control:
        clock = Stopwatch()
        await control.reset(identity, deadline_s=RESET_DEADLINE_S)
        return clock.ms()
