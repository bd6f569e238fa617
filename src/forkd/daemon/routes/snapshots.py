"""Snapshots and the images under them: make, list, look, remove, tidy."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request, Response

from forkd.daemon import convert, streaming
from forkd.daemon.routes import ServiceOf, TagOf, router
from forkd.model.ids import parse_tag
from forkd.model.image import Image
from forkd.model.snapshot import LinkRequest, Snapshot, SnapshotStatus
from forkd.wire import v1

routes = router("snapshots")


def _streamed(event: object) -> dict[int | str, dict[str, Any]]:
    content = {streaming.NDJSON: {"schema": {"$ref": f"#/components/schemas/{event}"}}}
    return {
        200: {
            "description": "Events, one a line, for `Accept: " + streaming.NDJSON + "`",
            "content": content,
        }
    }


def _wants_stream(request: Request) -> bool:
    return streaming.NDJSON in request.headers.get("accept", "")


@routes.post(
    "/v1/snapshots",
    operation_id="create_snapshot",
    status_code=201,
    response_model=v1.SnapshotInfo,
    responses={
        **_streamed("SnapshotStreamEvent"),
        202: {"model": v1.SnapshotInfo, "description": "It is being written, for `wait` false"},
    },
)
async def create_snapshot(
    body: v1.SnapshotCreate, request: Request, service: ServiceOf, response: Response
) -> Response | v1.SnapshotInfo:
    """Make a snapshot; answers when it is ready, or tells how far it is if asked to."""
    wanted = convert.snapshot_request(body)
    if isinstance(wanted, LinkRequest):
        source = service.link_snapshot(wanted)
    else:
        source = service.create_snapshot(wanted)
    if _wants_stream(request):
        return await streaming.events(source, convert.snapshot_event)
    made = await streaming.last(source, Snapshot)
    response.status_code = 202 if made.status is SnapshotStatus.WRITING else 201
    return convert.snapshot(made)


@routes.get("/v1/snapshots", operation_id="list_snapshots")
async def list_snapshots(service: ServiceOf) -> list[v1.SnapshotInfo]:
    """List every snapshot, by tag, those being written included."""
    return [convert.snapshot(each) for each in await service.list_snapshots()]


@routes.get("/v1/snapshots/{tag}/info", operation_id="get_snapshot")
async def get_snapshot(tag: TagOf, service: ServiceOf) -> v1.SnapshotInfoDetail:
    """Describe one snapshot, with what it stands on and what stands on it."""
    stored = await service.get_snapshot(tag)
    every, forks = await service.list_snapshots(), await service.list_sandboxes(tag)
    return convert.snapshot_detail(stored, every, forks)


@routes.delete("/v1/snapshots/{tag}", operation_id="delete_snapshot", status_code=204)
async def delete_snapshot(
    tag: TagOf, query: Annotated[v1.SnapshotDelete, Query()], service: ServiceOf
) -> None:
    """Remove a snapshot and its files; refused while something needs it."""
    await service.delete_snapshot(tag, cascade=query.cascade, force=query.force)


@routes.post("/v1/snapshots/{tag}/compact", operation_id="compact_snapshot")
async def compact_snapshot(
    tag: TagOf, service: ServiceOf, body: v1.SnapshotCompact | None = None
) -> v1.SnapshotInfo:
    """Write a snapshot so that it needs no other, in its place or under another name."""
    to = None if body is None or body.to is None else parse_tag(body.to, field="to")
    return convert.snapshot(await service.compact_snapshot(tag, to))


@routes.post("/v1/snapshots:gc", operation_id="gc_snapshots")
async def gc_snapshots(service: ServiceOf, body: v1.SnapshotGc | None = None) -> v1.SnapshotGcInfo:
    """Remove what nobody can use any more: leftovers, failures, orphans, idle images."""
    dry_run = body is not None and body.dry_run
    return convert.removed(await service.tidy_snapshots(dry_run=dry_run))


@routes.post(
    "/v1/images",
    operation_id="build_image",
    status_code=201,
    response_model=v1.ImageInfo,
    responses=_streamed("ImageStreamEvent"),
)
async def build_image(
    body: v1.ImageBuild, request: Request, service: ServiceOf
) -> Response | v1.ImageInfo:
    """Build the image of a recipe, unless it is built already."""
    source = service.build_image(convert.recipe_path(body.recipe))
    if _wants_stream(request):
        return await streaming.events(source, convert.image_event)
    return convert.image(await streaming.last(source, Image))
