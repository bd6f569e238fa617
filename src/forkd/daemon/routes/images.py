"""Images: build, list, remove, and have a snapshot of one."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response

from forkd.daemon import convert, convert_images, streaming
from forkd.daemon.bodies import takes_body
from forkd.daemon.pages import PAGED, by_last_use, page_of
from forkd.daemon.routes import (
    BuildLinksOf,
    CallerOf,
    ImageCacheOf,
    ImageSnapshotsOf,
    ImagesOf,
    PageOf,
    SandboxesOf,
    router,
    sandbox_of,
    streamed,
    wants_stream,
)
from forkd.limits import IMAGE_KEY_PATTERN
from forkd.model.caller import Scope
from forkd.model.image import Image
from forkd.model.recipe import parse_recipe_source
from forkd.model.snapshot import Snapshot
from forkd.wire import v2, v2_builds, v2_images

routes = router("images")


@routes.post(
    "/v2/images",
    operation_id="build_image",
    status_code=201,
    response_model=v2.ImageInfo,
    responses=streamed("ImageStreamEvent"),
)
@takes_body(Scope.SNAPSHOTS, creates=True)
async def build_image(
    body: v2.ImageBuild, request: Request, caller: CallerOf, images: ImagesOf
) -> Response | v2.ImageInfo:
    """Build the image of a recipe, unless it is built already."""
    source = images.build(caller, parse_recipe_source(body.recipe))
    if wants_stream(request):
        return await streaming.events(source, convert.image_event)
    return convert.image(await streaming.last(source, Image))


@routes.get("/v2/images", operation_id="list_images", responses=PAGED)
async def list_images(
    caller: CallerOf, images: ImageCacheOf, page: PageOf, response: Response
) -> list[v2_images.CachedImageInfo]:
    """List the images in the cache, the one that was used last first."""
    found = page_of(await images.list(caller), by_last_use, page, response)
    return [convert_images.cached_image(each) for each in found]


@routes.delete("/v2/images/{key}", operation_id="remove_image", status_code=204)
async def remove_image(
    key: Annotated[str, Path(pattern=IMAGE_KEY_PATTERN, description="Key of an image.")],
    caller: CallerOf,
    images: ImageCacheOf,
) -> None:
    """Remove an image from the cache; refused while a snapshot needs it."""
    await images.remove(caller, key)


@routes.post(
    "/v2/snapshots:image",
    operation_id="snapshot_image",
    status_code=201,
    response_model=v2.SnapshotInfo,
    responses=streamed("SnapshotStreamEvent"),
)
@takes_body(Scope.SNAPSHOTS, creates=True)
async def snapshot_image(
    body: v2_images.ImageSnapshot, request: Request, caller: CallerOf, images: ImageSnapshotsOf
) -> Response | v2.SnapshotInfo:
    """Return a ready snapshot of an image, made unless there is one."""
    source = images.for_image(caller, convert_images.image_snapshot_request(body))
    if wants_stream(request):
        return await streaming.events(source, convert.snapshot_event)
    return convert.snapshot(await streaming.last(source, Snapshot))


@routes.post("/v2/snapshots:build", operation_id="build_link", status_code=201)
@takes_body(Scope.SNAPSHOTS, Scope.RUN, creates=True)
async def build_link(
    body: v2_builds.BuildLink, caller: CallerOf, links: BuildLinksOf, sandboxes: SandboxesOf
) -> v2.SnapshotInfo:
    """Return the result of a step of a build, written from a sandbox unless there is one."""
    found = None
    if body.sandbox is not None:
        found = await sandbox_of(caller, sandboxes, body.sandbox, field="sandbox")
    request = convert_images.build_link_request(body, found)
    return convert.snapshot(await links.link(caller, request))
