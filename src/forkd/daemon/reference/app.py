"""The application of the reference's protocol, which the daemon's own mounts under `/v1`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from forkd.daemon.reference import errors, processes, sandboxes, snapshots

if TYPE_CHECKING:
    from starlette.datastructures import State

PREFIX = "/v1"

DESCRIPTION = """\
The protocol of the reference implementation, for clients that were written for that one.

Requests may have members that are not here.  `X-Forkd-Ignored` names the options of a request that
have no effect.  An error has what the reference's has, `error`, and what ours have beside it.
"""


def create_reference(state: State) -> FastAPI:
    """Return the application; `state` is that of the one that mounts it, which has the host."""
    app = FastAPI(
        title="forkd, as the reference",
        version="1",
        description=DESCRIPTION,
        servers=[{"url": PREFIX}],
        root_path_in_servers=False,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state = state
    errors.install(app)
    for module in (snapshots, sandboxes, processes):
        app.include_router(module.routes)
    return app
