"""Snapshots: make, list, look, remove, tidy."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from forkd.daemon import convert, streaming
from forkd.daemon.bodies import takes_body
from forkd.daemon.pages import PAGED, page_of
from forkd.daemon.routes import (
    CallerOf,
    ChainsOf,
    PageOf,
    SandboxesOf,
    SnapshotsOf,
    TagOf,
    router,
    streamed,
    wants_stream,
)
from forkd.model.caller import Scope
from forkd.model.filters import SandboxFilter
from forkd.model.ids import parse_tag
from forkd.model.snapshot import LinkRequest, Snapshot, SnapshotStatus
from forkd.wire import v2, v2_rights

routes = router("snapshots")


@routes.post(
    "/v2/snapshots",
    operation_id="create_snapshot",
    status_code=201,
    response_model=v2.SnapshotInfo,
    responses={
        **streamed("SnapshotStreamEvent"),
        202: {"model": v2.SnapshotInfo, "description": "It is being written, for `wait` false"},
    },
)
@takes_body(Scope.SNAPSHOTS, creates=True)
async def create_snapshot(
    body: v2.SnapshotCreate,
    request: Request,
    caller: CallerOf,
    snapshots: SnapshotsOf,
    chains: ChainsOf,
    response: Response,
) -> Response | v2.SnapshotInfo:
    """Make a snapshot; answers when it is ready, or tells how far it is if asked to."""
    wanted = convert.snapshot_request(body)
    if isinstance(wanted, LinkRequest):
        source = chains.extend(caller, wanted)
    else:
        source = snapshots.bake(caller, wanted)
    if wants_stream(request):
        return await streaming.events(source, convert.snapshot_event)
    made = await streaming.last(source, Snapshot)
    response.status_code = 202 if made.status is SnapshotStatus.WRITING else 201
    return convert.snapshot(made)


@routes.get("/v2/snapshots", operation_id="list_snapshots", responses=PAGED)
async def list_snapshots(
    query: PageOf, caller: CallerOf, snapshots: SnapshotsOf, response: Response
) -> list[v2.SnapshotInfo]:
    """List every snapshot, by tag, those being written included."""
    found = page_of(await snapshots.list(caller), lambda each: (each.tag,), query, response)
    return [convert.snapshot(each) for each in found]


@routes.get("/v2/snapshots/{tag}/info", operation_id="get_snapshot")
async def get_snapshot(
    tag: TagOf, caller: CallerOf, snapshots: SnapshotsOf, sandboxes: SandboxesOf
) -> v2.SnapshotInfoDetail:
    """Describe one snapshot, with what it depends on and what depends on it."""
    stored = await snapshots.get(caller, tag)
    every = await snapshots.list(caller)
    forks = await sandboxes.list(caller, SandboxFilter(tag=tag))
    return convert.snapshot_detail(stored, every, forks)


@routes.delete("/v2/snapshots/{tag}", operation_id="delete_snapshot", status_code=204)
async def delete_snapshot(
    tag: TagOf,
    query: Annotated[v2.SnapshotDelete, Query()],
    caller: CallerOf,
    snapshots: SnapshotsOf,
) -> None:
    """Remove a snapshot and its files; refused while something needs it."""
    await snapshots.delete(caller, tag, cascade=query.cascade, force=query.force)


@routes.put("/v2/snapshots/{tag}/shared", operation_id="share_snapshot")
@takes_body(Scope.SNAPSHOTS)
async def share_snapshot(
    tag: TagOf, body: v2_rights.SnapshotShare, caller: CallerOf, snapshots: SnapshotsOf
) -> v2.SnapshotInfo:
    """Let every tenant use a snapshot, or only its own again."""
    return convert.snapshot(await snapshots.share(caller, tag, shared=body.shared))


@routes.post("/v2/snapshots/{tag}/compact", operation_id="compact_snapshot")
@takes_body(Scope.SNAPSHOTS, creates=True)
async def compact_snapshot(
    tag: TagOf, caller: CallerOf, chains: ChainsOf, body: v2.SnapshotCompact | None = None
) -> v2.SnapshotInfo:
    """Write a snapshot so that it needs no other, in its place or under another name."""
    to = None if body is None or body.to is None else parse_tag(body.to, field="to")
    return convert.snapshot(await chains.compact(caller, tag, to))


@routes.post("/v2/snapshots:gc", operation_id="gc_snapshots")
@takes_body(Scope.ADMIN)
async def gc_snapshots(
    caller: CallerOf, snapshots: SnapshotsOf, body: v2.SnapshotGc | None = None
) -> v2.SnapshotGcInfo:
    """Remove what is unused: leftovers, failures, orphans, idle images."""
    dry_run = body is not None and body.dry_run
    return convert.removed(await snapshots.tidy(caller, dry_run=dry_run))
