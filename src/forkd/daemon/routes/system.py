"""What the daemon and its host are."""

from __future__ import annotations

import forkd
from forkd.daemon import convert
from forkd.daemon.routes import ServiceOf, router
from forkd.wire import v1

routes = router("system")


@routes.get("/healthz", operation_id="health")
async def health() -> v1.Health:
    """Say that the daemon lives.  Needs no token."""
    return v1.Health(ok=True)


@routes.get("/version", operation_id="version")
async def version() -> v1.Version:
    """Say which forkd this is."""
    return v1.Version(version=forkd.__version__)


@routes.get("/v1/host", operation_id="get_host")
async def get_host(service: ServiceOf) -> v1.HostInfo:
    """Say what the host is and how full it is."""
    return convert.host_info(await service.host_info())
