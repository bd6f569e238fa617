"""The reference's sandboxes: fork, list, describe, branch, end."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from fastapi import Response

from forkd.daemon.bodies import takes_body
from forkd.daemon.reference import ReferenceIdOf, convert
from forkd.daemon.routes import BranchesOf, CallerOf, SandboxesOf, SnapshotsOf, router
from forkd.errors import Conflict, EngineError, NotFound, StoreError
from forkd.model.caller import Caller, Scope
from forkd.model.ids import SandboxId, parse_tag
from forkd.model.sandbox import BranchOptions, Sandbox, SandboxState
from forkd.wire import v1

routes = router("sandboxes")


@routes.post("/sandboxes", operation_id="fork", status_code=201)
@takes_body(Scope.RUN)
async def fork(
    body: v1.SandboxCreate, caller: CallerOf, sandboxes: SandboxesOf, response: Response
) -> list[v1.SandboxInfo]:
    """Fork sandboxes: all of them, or none and an error; 409 from a snapshot that is not ready."""
    tag = parse_tag(body.snapshot_tag, field="snapshot_tag")
    convert.say_ignored(body, response)
    try:
        result = await sandboxes.fork(caller, tag, body.n, convert.fork_options(body))
    except StoreError as error:
        raise Conflict(str(error), tag=tag) from error
    return [convert.sandbox(each) for each in result.sandboxes]


@routes.get("/sandboxes", operation_id="list_sandboxes")
async def list_sandboxes(
    caller: CallerOf, sandboxes: SandboxesOf, snapshots: SnapshotsOf
) -> list[v1.SandboxInfo]:
    """List the sandboxes that have not ended, oldest first."""
    counts = convert.branch_counts(await snapshots.list(caller))
    return [
        convert.sandbox(each, counts.get(each.id, 0))
        for each in await sandboxes.list(caller)
        if each.state is not SandboxState.EXITED
    ]


@routes.get("/sandboxes/{id}", operation_id="get_sandbox")
async def get_sandbox(
    sandbox: ReferenceIdOf, caller: CallerOf, sandboxes: SandboxesOf, snapshots: SnapshotsOf
) -> v1.SandboxInfo:
    """Describe one sandbox."""
    found = await _alive(sandboxes, caller, sandbox)
    counts = convert.branch_counts(await snapshots.list(caller))
    return convert.sandbox(found, counts.get(found.id, 0))


@routes.delete("/sandboxes/{id}", operation_id="delete_sandbox", status_code=204)
async def delete_sandbox(sandbox: ReferenceIdOf, caller: CallerOf, sandboxes: SandboxesOf) -> None:
    """End a sandbox and remove everything that was its own."""
    await sandboxes.delete(caller, sandbox)


@routes.post(
    "/sandboxes/{id}/branch",
    operation_id="branch",
    status_code=201,
    response_model_exclude_none=True,
    responses={202: {"model": v1.SnapshotInfo, "description": "It is being written"}},
)
@takes_body(Scope.RUN)
async def branch(
    sandbox: ReferenceIdOf,
    caller: CallerOf,
    branches: BranchesOf,
    sandboxes: SandboxesOf,
    response: Response,
    body: v1.BranchCreate | None = None,
) -> v1.SnapshotInfo:
    """Write a running sandbox down as a snapshot; it goes on."""
    wanted = body or v1.BranchCreate()
    source = await _alive(sandboxes, caller, sandbox)
    tag = convert.branch_tag(wanted, source, datetime.now(UTC))
    convert.say_ignored(wanted, response)
    options = BranchOptions()
    result = await branches.branch(caller, sandbox, 0, options, tag=tag, wait=wanted.wait)
    if result.snapshot is None:
        raise EngineError("a branch with a tag made no snapshot", tag=tag)
    response.status_code = 201 if wanted.wait else 202
    return convert.snapshot(replace(result.snapshot, pause_ms=result.pause_ms))


async def _alive(sandboxes: SandboxesOf, caller: Caller, sandbox: SandboxId) -> Sandbox:
    """Return a sandbox that has not ended; the reference does not remember those that have."""
    found = await sandboxes.get(caller, sandbox)
    if found.state is SandboxState.EXITED:
        raise NotFound(f"sandbox {sandbox} has ended: {found.exit_reason}", sandbox=sandbox)
    return found
