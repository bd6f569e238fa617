"""The reference's snapshots: bake, list, describe, compact, remove."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Response

from forkd.daemon import streaming
from forkd.daemon.bodies import takes_body
from forkd.daemon.reference import convert
from forkd.daemon.routes import CallerOf, ChainsOf, SnapshotsOf, TagOf, router
from forkd.errors import Conflict, InvalidRequest
from forkd.model.caller import Scope
from forkd.model.ids import parse_tag
from forkd.model.snapshot import Snapshot
from forkd.wire import v1

routes = router("snapshots")


@routes.post(
    "/snapshots",
    operation_id="create_snapshot",
    status_code=201,
    response_model_exclude_none=True,
)
@takes_body(Scope.SNAPSHOTS)
async def create_snapshot(
    body: v1.SnapshotCreate, caller: CallerOf, snapshots: SnapshotsOf, response: Response
) -> v1.SnapshotInfo:
    """Bake a snapshot of the recipe that `rootfs` names; a tag that is taken is a 400."""
    wanted = convert.snapshot_request(body)
    convert.say_ignored(body, response)
    try:
        made = await streaming.last(snapshots.bake(caller, wanted), Snapshot)
    except Conflict as error:
        raise InvalidRequest(str(error), field="tag") from error
    return convert.snapshot(made)


@routes.get("/snapshots", operation_id="list_snapshots", response_model_exclude_none=True)
async def list_snapshots(caller: CallerOf, snapshots: SnapshotsOf) -> list[v1.SnapshotInfo]:
    """List every snapshot, by tag, those being written included."""
    return [convert.snapshot(each) for each in await snapshots.list(caller)]


@routes.get("/snapshots/{tag}/info", operation_id="get_snapshot", response_model_exclude_none=True)
async def get_snapshot(
    tag: TagOf, caller: CallerOf, snapshots: SnapshotsOf
) -> v1.SnapshotInfoDetail:
    """Describe one snapshot, with what it depends on and what depends on it."""
    stored = await snapshots.get(caller, tag)
    return convert.snapshot_detail(stored, await snapshots.list(caller))


@routes.delete("/snapshots/{tag}", operation_id="delete_snapshot", status_code=204)
async def delete_snapshot(
    tag: TagOf,
    query: Annotated[v1.SnapshotDelete, Query()],
    caller: CallerOf,
    snapshots: SnapshotsOf,
) -> None:
    """Remove a snapshot and its files; refused while something needs it."""
    await snapshots.delete(caller, tag, cascade=query.cascade, force=query.force)


@routes.post(
    "/snapshots/{tag}/compact", operation_id="compact_snapshot", response_model_exclude_none=True
)
@takes_body(Scope.SNAPSHOTS)
async def compact_snapshot(
    tag: TagOf, body: v1.SnapshotCompact, caller: CallerOf, chains: ChainsOf
) -> v1.SnapshotInfo:
    """Write a snapshot, under another name, so that it needs no other."""
    to = parse_tag(body.to, field="to")
    if to == tag:
        raise InvalidRequest("to must be another tag", field="to")
    return convert.snapshot(await chains.compact(caller, tag, to))
