"""What the daemon and its host are."""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.requests import HTTPConnection
from fastapi.responses import PlainTextResponse

import forkd
from forkd.daemon import convert
from forkd.daemon.routes import CallerOf, FiguresOf, SystemOf, router
from forkd.wire import v2

routes = router("system")


@routes.get("/healthz", operation_id="health")
async def health() -> v2.Health:
    """Say that the daemon lives.  Needs no token."""
    return v2.Health(ok=True)


@routes.get(
    "/readyz",
    operation_id="ready",
    responses={
        503: {"model": v2.Readiness, "description": "It does not serve, and is about to end"}
    },
)
async def ready(connection: HTTPConnection, response: Response) -> v2.Readiness:
    """Say whether the daemon serves.  Needs no token."""
    failure: str | None = connection.app.state.failure()
    response.status_code = 200 if failure is None else 503
    return v2.Readiness(ready=failure is None)


@routes.get("/version", operation_id="version")
async def version() -> v2.Version:
    """Say which forkd this is."""
    return v2.Version(version=forkd.__version__)


@routes.get("/v2/host", operation_id="get_host")
async def get_host(caller: CallerOf, system: SystemOf) -> v2.HostInfo:
    """Say what the host is and how full it is."""
    return convert.host_info(await system.info(caller))


@routes.get("/metrics", operation_id="metrics", response_class=PlainTextResponse)
async def metrics(caller: CallerOf, figures: FiguresOf, request: Request) -> Response:
    """Give all figures in the format of Prometheus, or of OpenMetrics if that is asked for."""
    text, media_type = await figures.exposition(caller, request.headers.get("accept", ""))
    return Response(text, headers={"Content-Type": media_type})
