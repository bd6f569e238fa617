"""What a host does and how full it is, in figures for Prometheus.

Counters and histograms count as things happen; gauges are set when somebody scrapes.  What is
expensive, the memory of every process, is read in a thread, at most every `FRESH_S`, and for
`READING_S_MAX` at most.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkd.host import files, proc
from forkd.host.holdings import Holdings
from forkd.installed import VERSION
from forkd.model.caller import Scope
from forkd.model.sandbox import SandboxState
from forkd.model.snapshot import SnapshotStatus
from forkd.service import seeds
from forkd.service.use_case import use_case
from forkd.telemetry import names

if TYPE_CHECKING:
    from forkd.model.caller import Caller
    from forkd.service.images import Images
    from forkd.service.journal import Journal
    from forkd.service.sandboxes.roster import Roster
    from forkd.service.settings import HostSettings
    from forkd.service.slots import Slots
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.workers import Workers
    from forkd.service.zygotes import ZygotePool
    from forkd.telemetry.lag import LoopLag
    from forkd.telemetry.telemetry import Telemetry

FRESH_S = 5.0
"""How long what was read of processes is shown again before it is read anew."""

READING_S_MAX = 0.5
"""Longest that one reading takes; processes beyond it keep what was read of them before."""


@dataclass(slots=True)
class Figures:
    """The figures of one host; `forkd.service.api.Figures` documents what a caller may ask.

    Attributes:
        telemetry: Where they are.
        settings: Where things are.
        roster: Which sandboxes there are.
        catalog: Which snapshots there are.
        zygotes: Which zygotes live.
        images: How many are being built.
        journal: Who follows it.
        lag: By how much the loop is late.
        slots: Which network slots are ready.
        workers: Read what processes hold.
    """

    telemetry: Telemetry
    settings: HostSettings
    roster: Roster
    catalog: Catalog
    zygotes: ZygotePool
    images: Images
    journal: Journal
    lag: LoopLag
    slots: Slots
    workers: Workers
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _holdings: Holdings = field(init=False)
    _read_at_s: float | None = None

    def __post_init__(self) -> None:
        self._holdings = Holdings(self.settings.tops_dir)
        self.telemetry.set(names.BUILD_INFO, 1, VERSION)

    @use_case("metrics", Scope.METRICS)
    async def exposition(self, caller: Caller, accept: str) -> tuple[bytes, str]:
        """Return all figures as text, and which media type it is."""
        self._count()
        async with self._reading:
            now_s = time.monotonic()
            if self._read_at_s is None or now_s - self._read_at_s >= FRESH_S:
                machines = [each.pid for each in self.roster.all() if each.pid is not None]
                zygotes = self.zygotes.pids()
                await self.workers.run(caller, lambda: self._read_processes(machines, zygotes))
                self._read_at_s = time.monotonic()
        return await asyncio.to_thread(self._expose, accept)

    def _count(self) -> None:
        """Set what is known in the event loop."""
        telemetry = self.telemetry
        states = Counter(each.state for each in self.roster.all())
        for state in SandboxState:
            telemetry.set(names.SANDBOXES, states[state], state)
        statuses = Counter(each.status for each in self.catalog.all())
        for status in SnapshotStatus:
            telemetry.set(names.SNAPSHOTS, statuses[status], status)
        telemetry.set(names.ZYGOTES, len(self.zygotes.pids()))
        telemetry.set(names.BUILDS, self.images.running, "running")
        telemetry.set(names.BUILDS, self.images.waiting, "waiting")
        telemetry.set(names.FOLLOWERS, self.journal.followers)
        telemetry.set(names.SLOTS_READY, len(self.slots.ready))
        telemetry.set(names.LAG_SECONDS, self.lag.longest_s())

    def _read_processes(self, machines: list[int], zygotes: tuple[int, ...]) -> None:
        """Set what processes hold; blocks."""
        theirs = {*machines, *seeds.retired_for(machines)}
        holdings = self._holdings.read(theirs.union(zygotes), within_s=READING_S_MAX)
        private_bytes = sum(holdings[pid].private_bytes for pid in theirs if pid in holdings)
        all_bytes = sum(each.proportional_bytes for each in holdings.values())
        self.telemetry.set(names.PRIVATE_BYTES, private_bytes)
        self.telemetry.set(names.SHARED_BYTES, max(0, all_bytes - private_bytes))
        tops = {file: size for each in holdings.values() for file, size in each.nameless.items()}
        self.telemetry.set(names.TOPS_BYTES, sum(tops.values()))

    def _expose(self, accept: str) -> tuple[bytes, str]:
        """Set what the kernel says at once, and write everything down; blocks."""
        folders = {"state": self.settings.state_dir, "tops": self.settings.tops_dir}
        for name, folder in folders.items():
            free_bytes, size_bytes = files.disk_bytes(folder)
            self.telemetry.set(names.DISK_FREE_BYTES, free_bytes, name)
            self.telemetry.set(names.DISK_SIZE_BYTES, size_bytes, name)
        _, available_bytes = proc.memory_bytes()
        self.telemetry.set(names.HOST_AVAILABLE_BYTES, available_bytes)
        return self.telemetry.exposition(accept)
