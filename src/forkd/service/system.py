"""What this host is and how full it is."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.host import files, kvm, netlink, nftables, proc
from forkd.installed import VERSION
from forkd.model.caller import Scope
from forkd.model.host import HostInfo
from forkd.service.use_case import use_case

if TYPE_CHECKING:
    from forkd.cgroups.tree import CgroupTree
    from forkd.model.caller import Caller
    from forkd.service.sandboxes.roster import Roster
    from forkd.service.settings import HostSettings
    from forkd.service.snapshots.catalog import Catalog
    from forkd.telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class System:
    """The host itself; `forkd.service.api.System` documents what a caller may ask.

    Attributes:
        settings: Where things are.
        cgroups: Where limited sandboxes have their cgroups.
        catalog: Which snapshots there are.
        roster: Which sandboxes there are.
        opened_at_s: When the service began, by the monotonic clock.
    """

    telemetry: Telemetry
    settings: HostSettings
    cgroups: CgroupTree
    catalog: Catalog
    roster: Roster
    opened_at_s: float

    @use_case("host_info", Scope.READ)
    async def info(self, caller: Caller) -> HostInfo:
        """Return what this host is and how full it is."""
        snapshots = len(self.catalog.visible(caller))
        sandboxes = sum(caller.may_touch(each.owner) for each in self.roster.alive())
        return await asyncio.to_thread(self._read, snapshots, sandboxes)

    def _read(self, snapshots: int, sandboxes: int) -> HostInfo:
        memory_bytes, memory_available_bytes = proc.memory_bytes()
        return HostInfo(
            version=VERSION,
            hostname=proc.hostname(),
            kernel=proc.kernel(),
            cpu_model=proc.cpu().model,
            cpus=proc.cpus_available(),
            memory_bytes=memory_bytes,
            memory_available_bytes=memory_available_bytes,
            kvm=kvm.is_usable(),
            pvm=kvm.is_pvm(),
            cgroups=self.cgroups.usable(),
            network=netlink.can_make_taps() and nftables.is_available(),
            jail=self.settings.jailed,
            state_free_bytes=files.free_bytes(self.settings.state_dir),
            snapshots=snapshots,
            sandboxes=sandboxes,
            uptime_s=time.monotonic() - self.opened_at_s,
        )
