"""The application: every route, over one host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from forkd.daemon import errors, mcp, openapi
from forkd.daemon.bodies import Room
from forkd.daemon.event_stream import EventTexts
from forkd.daemon.reference.app import PREFIX, create_reference
from forkd.daemon.routes import (
    events,
    files,
    images,
    network,
    packs,
    processes,
    recipes,
    rights,
    sandboxes,
    secrets,
    snapshots,
    system,
    trees,
    usage,
)
from forkd.limits import BODIES_BYTES_MAX, OUTPUTS_BYTES_MAX
from forkd.model.output import OutputBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.service.api import Host

DESCRIPTION = """\
fork(2) for virtual machines.

Every answer that is not a success is an `ErrorBody`.  Members that a request does not have are
refused.  The exec WebSocket, the streams of events and the rules by which this API changes are
described in protocol/rest/README.md.  `/v1` is another API: /v1/openapi.json.
"""


def _never() -> None:
    return None


def create_app(host: Host, failure: Callable[[], str | None] = _never) -> FastAPI:
    """Return the application.

    Args:
        host: What it asks; neither opened nor closed here.
        failure: Returns why the host cannot go on; None as long as it can.
    """
    app = FastAPI(
        title="forkd",
        version="1",
        summary="fork(2) for virtual machines",
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url="/v2/openapi.json",
    )
    app.state.host = host
    app.state.failure = failure
    app.state.event_texts = EventTexts()
    app.state.outputs = OutputBudget(OUTPUTS_BYTES_MAX)
    errors.install(app)
    app.state.bodies = Room("bodies of requests", BODIES_BYTES_MAX)
    for module in (
        *(system, rights, secrets, events, recipes, images, snapshots, packs),
        *(sandboxes, trees, usage, network, processes, files),
    ):
        app.include_router(module.routes)
    app.router.routes.extend(mcp.routes())
    app.mount(PREFIX, create_reference(app.state))
    openapi.install(app)
    return app
