"""Snapshots and the images under them: bake, list, look, remove."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from forkd.daemon import convert, streaming
from forkd.daemon.routes import ServiceOf, TagOf, router
from forkd.model.image import Image
from forkd.model.snapshot import Snapshot
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
    responses=_streamed("SnapshotStreamEvent"),
)
async def create_snapshot(
    body: v1.SnapshotCreate, request: Request, service: ServiceOf
) -> Response | v1.SnapshotInfo:
    """Bake a snapshot; answers when it is ready, or tells how far it is if asked to."""
    source = service.create_snapshot(convert.snapshot_request(body))
    if _wants_stream(request):
        return await streaming.events(source, convert.snapshot_event)
    return convert.snapshot(await streaming.last(source, Snapshot))


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
async def delete_snapshot(tag: TagOf, service: ServiceOf) -> None:
    """Remove a snapshot and its files; refused while something needs it."""
    await service.delete_snapshot(tag)


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
