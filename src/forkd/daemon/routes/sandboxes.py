"""Sandboxes: fork, list, look, end, and what their consoles say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Path, Query, Response

from forkd.daemon import convert
from forkd.daemon.bodies import takes_body
from forkd.daemon.pages import PAGED, by_age, page_of
from forkd.daemon.routes import CallerOf, IdOf, SandboxesOf, router
from forkd.daemon.streaming import Stream
from forkd.errors import EngineError
from forkd.model.caller import Scope
from forkd.model.ids import parse_tag
from forkd.wire import v2

if TYPE_CHECKING:
    from forkd.model.sandbox import ForkResult

routes = router("sandboxes")


@routes.post(
    "/v2/sandboxes",
    operation_id="fork",
    status_code=201,
    responses={207: {"model": list[v2.ForkOutcome], "description": "Some failed, some are ready"}},
)
@takes_body(Scope.RUN, creates=True)
async def fork(
    body: v2.SandboxCreate, caller: CallerOf, sandboxes: SandboxesOf, response: Response
) -> list[v2.ForkOutcome]:
    """Fork sandboxes; one element for each, 207 if any of them failed, an error if all did."""
    tag = parse_tag(body.snapshot_tag, field="snapshot_tag")
    result = await sandboxes.fork(caller, tag, body.n, convert.fork_options(body))
    if not result.sandboxes:
        raise none_ready(result)
    response.headers["Server-Timing"] = f"fork;dur={result.wall_ms:.3f}"
    response.status_code = 207 if result.failures else 201
    return convert.outcomes(tag, result)


def none_ready(result: ForkResult) -> EngineError:
    """Return the error of a fork of which nothing came."""
    first = result.failures[0]
    return EngineError(
        f"none of {len(result.failures)} became ready; the first failed in {first.stage}: "
        f"{first.message}",
        stage=first.stage,
        reason=first.code,
    )


@routes.get("/v2/sandboxes", operation_id="list_sandboxes", responses=PAGED)
async def list_sandboxes(
    query: Annotated[v2.SandboxFilter, Query()],
    caller: CallerOf,
    sandboxes: SandboxesOf,
    response: Response,
) -> list[v2.SandboxInfo]:
    """List sandboxes, oldest first."""
    found = await sandboxes.list(caller, convert.sandbox_filter(query))
    return [convert.sandbox(each) for each in page_of(found, by_age, query, response)]


@routes.get("/v2/sandboxes/{id}", operation_id="get_sandbox")
async def get_sandbox(
    id: Annotated[str, Path(description="Name, id, or the beginning of no other id.")],  # noqa: A002 - the path's own word
    caller: CallerOf,
    sandboxes: SandboxesOf,
) -> v2.SandboxInfo:
    """Describe one sandbox; this route alone takes the beginning of an id, too."""
    return convert.sandbox(await sandboxes.find(caller, id))


@routes.patch("/v2/sandboxes/{id}", operation_id="change_sandbox")
@takes_body(Scope.RUN)
async def change_sandbox(
    sandbox: IdOf, body: v2.SandboxPatch, caller: CallerOf, sandboxes: SandboxesOf
) -> v2.SandboxInfo:
    """Change a sandbox's name, labels or time to live; what is left out stays as it is."""
    return convert.sandbox(await sandboxes.change(caller, sandbox, convert.sandbox_change(body)))


@routes.patch("/v2/sandboxes/{id}/limits", operation_id="set_limits")
@takes_body(Scope.RUN)
async def set_limits(
    sandbox: IdOf, body: v2.LimitsPatch, caller: CallerOf, sandboxes: SandboxesOf
) -> v2.SandboxInfo:
    """Change limits of a running sandbox, at once; those that are not named stay as they are."""
    return convert.sandbox(await sandboxes.set_limits(caller, sandbox, convert.new_limits(body)))


@routes.post("/v2/sandboxes/{id}/pause", operation_id="pause")
async def pause(sandbox: IdOf, caller: CallerOf, sandboxes: SandboxesOf) -> v2.SandboxInfo:
    """Stop a sandbox's vCPUs and keep its memory; nothing happens to one that is paused."""
    return convert.sandbox(await sandboxes.pause(caller, sandbox))


@routes.post("/v2/sandboxes/{id}/resume", operation_id="resume")
async def resume(sandbox: IdOf, caller: CallerOf, sandboxes: SandboxesOf) -> v2.SandboxInfo:
    """Have a paused sandbox go on; nothing happens to one that runs."""
    return convert.sandbox(await sandboxes.resume(caller, sandbox))


@routes.delete("/v2/sandboxes/{id}", operation_id="delete_sandbox", status_code=204)
async def delete_sandbox(sandbox: IdOf, caller: CallerOf, sandboxes: SandboxesOf) -> None:
    """End a sandbox and remove everything that was its own."""
    await sandboxes.delete(caller, sandbox)


@routes.get(
    "/v2/sandboxes/{id}/logs",
    operation_id="read_logs",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def read_logs(
    sandbox: IdOf, query: Annotated[v2.LogsRead, Query()], caller: CallerOf, sandboxes: SandboxesOf
) -> Response:
    """Return the end of what the guest wrote to its console; with `follow` also what comes."""
    if not query.follow:
        return Response(await sandboxes.console_log(caller, sandbox), media_type="text/plain")
    await sandboxes.get(caller, sandbox)
    pieces = sandboxes.follow_console_log(caller, sandbox)
    return Stream(pieces, owned=pieces, media_type="text/plain")
