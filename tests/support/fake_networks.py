"""What sandboxes of the host in memory may reach."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forkd.errors import Conflict
from forkd.model.caller import Scope
from forkd.model.network import NetworkStatus

if TYPE_CHECKING:
    from forkd.model.caller import Caller
    from forkd.model.ids import SandboxId
    from forkd.model.network import NetworkChange, RefusedDestination, RefusedName
    from forkd.model.sandbox import Sandbox
    from tests.support.fake_service import FakeService


@dataclass
class FakeNetworks:
    """Networks; `names` and `destinations` are what every sandbox was refused."""

    world: FakeService
    names: tuple[RefusedName, ...] = field(default=())
    destinations: tuple[RefusedDestination, ...] = field(default=())

    async def get(self, caller: Caller, sandbox: SandboxId) -> NetworkStatus:
        status = _network_of(self.world.guest(caller, sandbox, Scope.READ).sandbox)
        return replace(status, refused_names=self.names, refused_destinations=self.destinations)

    async def change(
        self, caller: Caller, sandbox: SandboxId, change: NetworkChange
    ) -> NetworkStatus:
        guest = self.world.guest(caller, sandbox)
        before = _network_of(guest.sandbox)
        held = before.held if change.hold is None else change.hold
        policy = change.of(before.policy)
        guest.sandbox = replace(guest.sandbox, network=policy, egress_held=held)
        return _network_of(guest.sandbox)


def _network_of(sandbox: Sandbox) -> NetworkStatus:
    if sandbox.network is None:
        raise Conflict(f"sandbox {sandbox.id} was forked without a network", sandbox=sandbox.id)
    return NetworkStatus(
        sandbox.network,
        sandbox.egress_held,
        "10.200.0.2",
        "10.200.0.1",
        "fd66:6b64:ac8::2",
        "fd66:6b64:ac8::1",
    )
