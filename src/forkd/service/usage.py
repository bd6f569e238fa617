"""What sandboxes use of the host: CPU time, private memory, disk, network.

All of them are measured together, at most once a second however many ask.  Private memory is dear:
the kernel walks all of a process for it, which takes milliseconds.  So of many sandboxes only some
are counted each time, those first that were not for the longest time; in between a sandbox has the
figure of its last count, or before the first an upper bound, which costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.errors import Conflict
from forkd.host import cgroupfs, proc
from forkd.model.caller import Scope
from forkd.model.usage import DiskIo, Traffic, Usage
from forkd.service.use_case import use_case

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forkd.cgroups.tree import CgroupTree
    from forkd.model.caller import Caller
    from forkd.model.ids import SandboxId
    from forkd.service.sandboxes.owner import SandboxOwner
    from forkd.service.sandboxes.roster import Roster
    from forkd.service.workers import Workers
    from forkd.telemetry.telemetry import Telemetry

FRESH_S = 1.0
"""How long what was measured is good for."""

COUNTING_S_MAX = 0.2
"""How long private memory is counted each time."""


@dataclass(slots=True)
class _Known:
    """What was measured.

    Attributes:
        at_s: When, by the monotonic clock.
        of: By process, since ids are exchanged by promotions.
    """

    at_s: float
    of: dict[int, Usage]


@dataclass(slots=True)
class UsageOfSandboxes:
    """Measures what sandboxes use; `forkd.service.api.Usages` documents what a caller may ask.

    Attributes:
        roster: Which sandboxes there are.
        cgroups: Where limited ones have their cgroups.
        tops_dir: Where their disks are.
        workers: Measure.
    """

    telemetry: Telemetry
    roster: Roster
    cgroups: CgroupTree
    tops_dir: Path
    workers: Workers
    _known: _Known = field(default_factory=lambda: _Known(-FRESH_S, {}))
    _counted: dict[int, tuple[float, int]] = field(default_factory=dict)
    _measuring: asyncio.Lock = field(default_factory=asyncio.Lock)

    @use_case("list_usage", Scope.READ)
    async def list(self, caller: Caller) -> tuple[Usage, ...]:
        """Return what every running sandbox uses, the oldest first."""
        known = await self._fresh(caller)
        return tuple(
            known[each.pid]
            for each in self.roster.visible(caller)
            if each.pid in known and known[each.pid].sandbox.id == each.id
        )

    @use_case("get_usage", Scope.READ)
    async def get(self, caller: Caller, sandbox: SandboxId) -> Usage:
        """Return what one running sandbox uses; its private memory is always counted."""
        owner = self.roster.get(caller, sandbox)
        owner.reachable_guest()
        found = await self.workers.run(caller, lambda: self._measure([owner], None))
        if not found:
            raise Conflict(f"sandbox {sandbox} has just ended", sandbox=sandbox)
        return next(iter(found.values()))

    async def _fresh(self, caller: Caller) -> dict[int, Usage]:
        """Return what was measured less than `FRESH_S` ago; who asks at once shares one."""
        async with self._measuring:
            if time.monotonic() - self._known.at_s >= FRESH_S:
                owners = [each for each in self.roster if _runs(each)]
                found = await self.workers.run(caller, lambda: self._measure_all(owners))
                self._known = _Known(time.monotonic(), found)
            return self._known.of

    def _measure_all(self, owners: Iterable[SandboxOwner]) -> dict[int, Usage]:
        longest_ago = sorted(owners, key=self._counted_at)
        found = self._measure(longest_ago, time.monotonic() + COUNTING_S_MAX)
        self._counted = {pid: self._counted[pid] for pid in found if pid in self._counted}
        return found

    def _counted_at(self, owner: SandboxOwner) -> float:
        at_s, _ = self._counted.get(owner.sandbox.pid or 0, (0.0, 0))
        return at_s

    def _measure(
        self,
        owners: Iterable[SandboxOwner],
        until_s: float | None,
    ) -> dict[int, Usage]:
        """Measure sandboxes; their private memory is counted until a time.  Blocks."""
        found: dict[int, Usage] = {}
        traffic, disk = proc.traffic(), self.cgroups.disk()
        for owner in owners:
            sandbox, slot = owner.sandbox, owner.lease.slot
            cpu_s = None if sandbox.pid is None else proc.cpu_s(sandbox.pid)
            if sandbox.pid is None or cpu_s is None:
                continue  # it has ended meanwhile
            private_bytes, exact = self._private(sandbox.pid, until_s)
            received, sent = (0, 0) if slot is None else traffic.get(slot.tap, (0, 0))
            found[sandbox.pid] = Usage(
                sandbox=sandbox,
                at=datetime.now(UTC),
                cpu_s=cpu_s,
                private_bytes=private_bytes,
                private_exact=exact,
                disk_bytes=proc.nameless_bytes(sandbox.pid, self.tops_dir),
                # What the host's end receives is what the guest has sent.
                traffic=None if slot is None else Traffic(received_bytes=sent, sent_bytes=received),
                cgroup_bytes=cgroupfs.memory_bytes(self.cgroups.path(owner.lease.id)),
                io=self._io(owner, disk),
            )
        return found

    def _io(self, owner: SandboxOwner, disk: str | None) -> DiskIo | None:
        found = None if disk is None else self.cgroups.io(owner.lease.id, disk)
        if found is None:
            return None
        counts = (found.get(each, 0) for each in ("rbytes", "wbytes", "rios", "wios"))
        return DiskIo(*counts)

    def _private(self, pid: int, until_s: float | None) -> tuple[int, bool]:
        if until_s is None or time.monotonic() < until_s:
            counted = proc.private_bytes(pid)
            if counted is not None:
                self._counted[pid] = time.monotonic(), counted
        known = self._counted.get(pid)
        return (proc.anonymous_bytes(pid), False) if known is None else (known[1], True)


def _runs(owner: SandboxOwner) -> bool:
    return owner.sandbox.state.has_machine
