"""What a sandbox may reach."""

from __future__ import annotations

from forkd.daemon import convert_network as convert
from forkd.daemon.bodies import takes_body
from forkd.daemon.routes import CallerOf, IdOf, NetworksOf, router
from forkd.model.caller import Scope
from forkd.wire import v2_network

routes = router("network")


@routes.get("/v2/sandboxes/{id}/network", operation_id="get_network")
async def get_network(
    sandbox: IdOf, caller: CallerOf, networks: NetworksOf
) -> v2_network.NetworkInfo:
    """Say what a sandbox may reach, and what it wanted to and was refused."""
    return convert.status(await networks.get(caller, sandbox))


@routes.patch("/v2/sandboxes/{id}/network", operation_id="change_network")
@takes_body(Scope.RUN)
async def change_network(
    sandbox: IdOf, body: v2_network.NetworkChange, caller: CallerOf, networks: NetworksOf
) -> v2_network.NetworkInfo:
    """Change what a running sandbox may reach; connections that it may not have any more end."""
    return convert.status(await networks.change(caller, sandbox, convert.change(body)))
