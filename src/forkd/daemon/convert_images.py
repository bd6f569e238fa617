"""Images and recipes of the host, as clients see them and ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.model.image import ImageSnapshotRequest
from forkd.model.recipe import RecipeChanges, parse_image_source
from forkd.wire import v2_images

if TYPE_CHECKING:
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
        name=recipe.name, description=recipe.description, error=recipe.error
    )
