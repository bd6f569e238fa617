"""Recipes of this host, on their way to the daemon."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from forkd.errors import InvalidRequest, NotFound
from forkd.sdk._image import Image
from forkd.sdk._images import LocalImage, find_local_image
from forkd.sdk._recipes import UPLOADED, Archive, find_local, find_local_base
from forkd.sdk._requests import build
from forkd.sdk._transport import async_pieces
from forkd.wire.v2 import ProgressEvent, RecipeInfo, SnapshotEvent
from forkd.wire.v2_images import HostRecipe, ImageSnapshot

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncIterator, Callable
    from os import PathLike

    from forkd.sdk._async.http import AsyncHttp
    from forkd.wire.v2 import SnapshotInfo

TOLD_BYTES = 8 * 1024 * 1024
"""How far an upload comes between two steps; of a shorter one nothing is told."""

TAG_DEFAULT = "pyagent"
"""The snapshot of a sandbox that names none, as in the reference's package."""

_RECIPES = TypeAdapter(list[HostRecipe])


class AsyncRecipes:
    """The recipes of a daemon."""

    def __init__(self, http: AsyncHttp) -> None:
        self._http = http

    async def list(self) -> builtins.list[HostRecipe]:
        """Return the recipes of the daemon's host, by name."""
        return await self._http.call(_RECIPES, "GET", "/v2/recipes")

    async def upload(
        self,
        recipe: str | PathLike[str],
        *,
        on_progress: Callable[[ProgressEvent], object] | None = None,
    ) -> RecipeInfo:
        """Upload the folder of a recipe of this host, unless the daemon has it.

        `create` and `build` do this by themselves.  The daemon keeps it for as long as builds use
        it, and for a week.

        Args:
            recipe: Its folder, or a TOML file in it; whatever else is in the folder goes along.  So
                does its base, if that is a folder of this host.
            on_progress: Called with each step, if it is large.

        Raises:
            NotFound: There is no such recipe.
            InvalidRequest: The recipe, or its folder, holds what it may not.
        """
        file = find_local(recipe)
        if file is None:
            raise NotFound(f"no recipe at {recipe}")
        base = find_local_base(file)
        if base is None:
            return await self._upload(Archive.of(file), on_progress)
        said, folder = base
        under = await self._upload(Archive.of(folder), on_progress)
        return await self._upload(Archive.of(file, (said, under.recipe)), on_progress)

    async def _upload(
        self, archive: Archive, on_progress: Callable[[ProgressEvent], object] | None
    ) -> RecipeInfo:
        digest = hashlib.sha256()
        async for piece in async_pieces(archive.pieces()):
            digest.update(piece)
        try:
            known = f"/v2/recipes/{UPLOADED}{digest.hexdigest()}"
            return await self._http.call(RecipeInfo, "GET", known)
        except NotFound:
            pieces = self._told(archive, on_progress)
            return await self._http.call(
                RecipeInfo,
                "POST",
                "/v2/recipes",
                content=pieces,
                content_type="application/x-tar",
                timeout_s=None,
            )

    async def reference(
        self,
        recipe: str | PathLike[str] | Image,
        on_progress: Callable[[ProgressEvent], object] | None,
    ) -> str:
        """Return what a request says for a recipe: one of this host is uploaded first."""
        if isinstance(recipe, Image):
            return await self.image_reference(recipe, on_progress)
        if not self._http.local_files or find_local(recipe) is None:
            return str(recipe)
        return (await self.upload(recipe, on_progress=on_progress)).recipe

    async def image_reference(
        self,
        image: str | PathLike[str] | Image,
        on_progress: Callable[[ProgressEvent], object] | None,
    ) -> str:
        """Return what a request says for an image: one of this host is uploaded first."""
        if isinstance(image, Image):
            return (await self._upload(image.archive(), on_progress)).recipe
        local = find_local_image(image) if self._http.local_files else str(image)
        if isinstance(local, str):
            return local
        if isinstance(local, LocalImage):
            return (await self._upload(local.archive(), on_progress)).recipe
        return (await self.upload(local, on_progress=on_progress)).recipe

    async def _told(
        self, archive: Archive, on_progress: Callable[[ProgressEvent], object] | None
    ) -> AsyncIterator[bytes]:
        """Pass an archive's pieces on, and tell now and then how many there were."""
        sent = 0
        async for piece in async_pieces(archive.pieces()):
            if on_progress is not None and sent // TOLD_BYTES != (sent + len(piece)) // TOLD_BYTES:
                done = (sent + len(piece)) / archive.size_bytes
                message = f"uploading {archive.name}, {archive.size_bytes >> 20} MiB"
                on_progress(ProgressEvent(stage="upload", message=message, fraction=done))
            sent += len(piece)
            yield piece


async def image_snapshot(
    http: AsyncHttp,
    request: ImageSnapshot,
    on_progress: Callable[[ProgressEvent], object] | None,
) -> SnapshotInfo:
    """Return a ready snapshot of an image, baked the first time that it is asked for."""
    event = await http.events("/v2/snapshots:image", request, SnapshotEvent, on_progress)
    return event.snapshot


async def snapshot_of(
    http: AsyncHttp,
    tag: str | None,
    image: str | PathLike[str] | Image | None,
    on_progress: Callable[[ProgressEvent], object] | None,
) -> str:
    """Return the snapshot of a tag or an image; the one to take, if there is neither.

    Raises:
        InvalidRequest: There are both.
    """
    if image is None:
        return tag or os.environ.get("FORKD_TAG") or TAG_DEFAULT
    if tag is not None:
        raise InvalidRequest("give a tag or an image, not both", field="image")
    named = await AsyncRecipes(http).image_reference(image, on_progress)
    return (await image_snapshot(http, build(ImageSnapshot, image=named), on_progress)).tag
