"""One module per noun; each holds a router.  A route parses, asks a component, renders."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.requests import HTTPConnection

from forkd.daemon import streaming
from forkd.daemon.bodies import BoundedRoute
from forkd.daemon.peers import CALLER, HELD
from forkd.model.caller import Caller
from forkd.model.ids import SandboxId, Tag, parse_sandbox_ref, parse_tag
from forkd.model.output import Kept
from forkd.service import api, api_images, api_team, api_trees
from forkd.wire.parts import Page
from forkd.wire.v2 import ErrorBody

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from contextlib import ExitStack

    from forkd.model.output import OutputBudget

ERRORS: Mapping[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request, or the guest, is at fault"},
    "5XX": {"model": ErrorBody, "description": "The host, the store or the machine is at fault"},
}


async def _caller(connection: HTTPConnection) -> Caller:
    caller: Caller = connection.scope[CALLER]
    return caller


def _component(name: str) -> Callable[[HTTPConnection], Coroutine[object, object, Any]]:
    """Return what finds one component of the application's host."""

    async def find(connection: HTTPConnection) -> Any:  # noqa: ANN401 - the annotation beside it says
        return getattr(connection.app.state.host, name)

    return find


async def _keep(connection: HTTPConnection) -> Callable[[int], Kept]:
    """Return what keeps an output, within the budget of all, until the request is over."""
    budget: OutputBudget = connection.app.state.outputs
    held: ExitStack = connection.scope[HELD]
    caller: Caller = connection.scope[CALLER]
    return lambda bytes_max: held.enter_context(budget.keep(caller, bytes_max))


async def _sandbox_id(
    id: Annotated[str, Path(description="Id or name of a sandbox.")],  # noqa: A002 - the path's own word
    connection: HTTPConnection,
) -> SandboxId:
    return await sandbox_of(connection.scope[CALLER], connection.app.state.host.sandboxes, id)


async def sandbox_of(
    caller: Caller, sandboxes: api.Sandboxes, text: str, *, field: str = "id"
) -> SandboxId:
    """Return the id of the sandbox whose id or name a client has written.

    Raises:
        InvalidRequest: It is neither; `context["field"]` is `field`.
        NotFound: The caller's tenant has named no sandbox so.
    """
    return await sandboxes.named(caller, parse_sandbox_ref(text, field=field))


async def _tag(tag: Annotated[str, Path(description="Name of a snapshot.")]) -> Tag:
    return parse_tag(tag)


CallerOf = Annotated[Caller, Depends(_caller)]
RecipesOf = Annotated[api_images.Recipes, Depends(_component("recipes"))]
ImagesOf = Annotated[api_images.Images, Depends(_component("images"))]
ImageCacheOf = Annotated[api_images.ImageCache, Depends(_component("image_cache"))]
BuildLinksOf = Annotated[api_images.BuildLinks, Depends(_component("build_links"))]
ImageSnapshotsOf = Annotated[api_images.ImageSnapshots, Depends(_component("image_snapshots"))]
SnapshotsOf = Annotated[api.Snapshots, Depends(_component("snapshots"))]
ChainsOf = Annotated[api.Chains, Depends(_component("chains"))]
PacksOf = Annotated[api.Packs, Depends(_component("packs"))]
SandboxesOf = Annotated[api.Sandboxes, Depends(_component("sandboxes"))]
BranchesOf = Annotated[api.Branches, Depends(_component("branches"))]
PromotionsOf = Annotated[api_trees.Promotions, Depends(_component("promotions"))]
ComparisonsOf = Annotated[api_trees.Comparisons, Depends(_component("comparisons"))]
TreesOf = Annotated[api_trees.Trees, Depends(_component("trees"))]
GuestsOf = Annotated[api.Guests, Depends(_component("guests"))]
TokensOf = Annotated[api_team.Tokens, Depends(_component("tokens"))]
TenantsOf = Annotated[api_team.Tenants, Depends(_component("tenants"))]
JournalOf = Annotated[api_team.Journal, Depends(_component("journal"))]
FiguresOf = Annotated[api_team.Figures, Depends(_component("figures"))]
UsageOf = Annotated[api_team.Usages, Depends(_component("usage"))]
NetworksOf = Annotated[api_team.Networks, Depends(_component("networks"))]
SecretsOf = Annotated[api_team.Secrets, Depends(_component("secrets"))]
SystemOf = Annotated[api_team.System, Depends(_component("system"))]
KeepOf = Annotated[Callable[[int], Kept], Depends(_keep)]
IdOf = Annotated[SandboxId, Depends(_sandbox_id)]
TagOf = Annotated[Tag, Depends(_tag)]
PageOf = Annotated[Page, Query()]


def bytes_as(media_type: str) -> dict[str, Any]:
    """Return OpenAPI's description of a body that is bytes."""
    return {"content": {media_type: {"schema": {"type": "string", "format": "binary"}}}}


def streamed(event: str) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's description of an answer that may come as a stream of events."""
    content = {streaming.NDJSON: {"schema": {"$ref": f"#/components/schemas/{event}"}}}
    return {
        200: {
            "description": "Events, one a line, for `Accept: " + streaming.NDJSON + "`",
            "content": content,
        }
    }


def wants_stream(request: Request) -> bool:
    """Whether a client asks for events."""
    return streaming.NDJSON in request.headers.get("accept", "")


def router(noun: str) -> APIRouter:
    """Return an empty router for the routes of one noun."""
    return APIRouter(tags=[noun], responses=dict(ERRORS), route_class=BoundedRoute)
