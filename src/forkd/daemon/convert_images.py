"""Images and recipes of the host, as clients see them and ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.model.ids import parse_tag
from forkd.model.image import ImageConfig, ImageSnapshotRequest
from forkd.model.recipe import RecipeChanges, parse_image_source
from forkd.model.snapshot import BuildLinkRequest
from forkd.wire import v2_builds, v2_images

if TYPE_CHECKING:
    from forkd.model.ids import SandboxId
    from forkd.model.image import CachedImage
    from forkd.model.recipe import RecipeEntry


def image_snapshot_request(request: v2_images.ImageSnapshot) -> ImageSnapshotRequest:
    """Return of what image a snapshot is wanted."""
    changes = RecipeChanges(
        memory_mib=request.memory_mib, vcpus=request.vcpus, disk_mib=request.disk_mib
    )
    source = parse_image_source(request.image)
    return ImageSnapshotRequest(source, changes, pull=request.pull == "always")


def cached_image(image: CachedImage) -> v2_images.CachedImageInfo:
    """Return an image in the cache as clients see it."""
    return v2_images.CachedImageInfo(
        key=image.key,
        name=image.name,
        reference=image.reference,
        digest=image.digest,
        bytes=image.stored_bytes,
        last_used_unix=int(image.used_at_s),
        snapshots=list(image.snapshots),
        tenant=image.tenant,
    )


def host_recipe(recipe: RecipeEntry) -> v2_images.HostRecipe:
    """Return a recipe of the operator's as clients see it."""
    return v2_images.HostRecipe(
        name=recipe.name, description=recipe.description, error=recipe.error, base=recipe.base
    )


def build_link_request(request: v2_builds.BuildLink, sandbox: SandboxId | None) -> BuildLinkRequest:
    """Return which result of a step is wanted, of a sandbox that was looked up."""
    said = request.config
    config = ImageConfig(
        env=said.env,
        cwd=said.cwd,
        user=said.user,
        entrypoint=None if said.entrypoint is None else tuple(said.entrypoint),
        cmd=None if said.cmd is None else tuple(said.cmd),
        ports=tuple(said.ports),
        labels=said.labels,
        healthcheck={
            name: value if isinstance(value, str) else tuple(value)
            for name, value in said.healthcheck.items()
        },
        stop_signal=said.stop_signal,
        volumes=tuple(said.volumes),
        shell=tuple(said.shell),
    )
    tag = None if request.tag is None else parse_tag(request.tag)
    return BuildLinkRequest(request.key, config, sandbox, tag)
