"""What sandboxes may reach: looked at, and changed while they run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forkd.errors import Conflict
from forkd.model.caller import Scope
from forkd.service.leases import walls_of
from forkd.service.use_case import use_case

if TYPE_CHECKING:
    from forkd.model.caller import Caller
    from forkd.model.ids import SandboxId
    from forkd.model.network import NetworkChange, NetworkStatus
    from forkd.service.egress import Egress
    from forkd.service.records import Records
    from forkd.service.sandboxes.owner import SandboxOwner
    from forkd.service.sandboxes.roster import Roster
    from forkd.telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Networks:
    """The networks of sandboxes; `forkd.service.api_team.Networks` says what a caller may ask.

    Attributes:
        roster: Which sandboxes there are.
        records: Where it is written down what they may reach.
        egress: What stands around them.
    """

    telemetry: Telemetry
    roster: Roster
    records: Records
    egress: Egress

    async def begin(self) -> None:
        """Put up the walls of the sandboxes that an earlier daemon forked.

        Raises:
            HostError: The kernel refused: they would not be safe to run.
        """
        await self.egress.begin(walls_of(each.lease for each in self.roster))

    @use_case("get_network", Scope.READ)
    async def get(self, caller: Caller, sandbox: SandboxId) -> NetworkStatus:
        """Return what a sandbox may reach, and what it was refused."""
        return await self._status(self.roster.get(caller, sandbox))

    @use_case("change_network", Scope.RUN)
    async def change(
        self, caller: Caller, sandbox: SandboxId, change: NetworkChange
    ) -> NetworkStatus:
        """Change what a running sandbox may reach, at once."""
        owner = self.roster.get(caller, sandbox)
        async with owner.exclusive("network") as found:
            owner.reachable_guest()
            before = owner.lease
            if found.network is None:
                raise _no_network(sandbox)
            policy = change.of(found.network)
            self.egress.check(policy)
            held = found.egress_held if change.hold is None else change.hold
            after = replace(before, policy=policy, held=held)
            # Written down before it is so: a daemon that is killed between puts it up at its start.
            changed = replace(found, network=policy, egress_held=held)
            await self.records.put([replace(owner.row, sandbox=changed)])
            await self.egress.put(walls_of([after]))
            owner.sandbox = changed
            before.policy, before.held = policy, held
        return await self._status(owner)

    async def _status(self, owner: SandboxOwner) -> NetworkStatus:
        wall = owner.lease.wall
        if wall is None:
            raise _no_network(owner.sandbox.id)
        return await self.egress.status(wall)


def _no_network(sandbox: SandboxId) -> Conflict:
    return Conflict(
        f"sandbox {sandbox} was forked without a network; fork with one, such as deny-all, to "
        "change it later",
        sandbox=sandbox,
    )
