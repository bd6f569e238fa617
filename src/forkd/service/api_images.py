"""What a front end may ask of the images and recipes of a host; the rules are those of `api`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable

    from forkd.model.caller import Caller
    from forkd.model.image import CachedImage, Image, ImageSnapshotRequest
    from forkd.model.progress import Progress
    from forkd.model.recipe import RecipeEntry, RecipeSource, StoredRecipe, UploadedRecipe
    from forkd.model.snapshot import BuildLinkRequest, Snapshot


class Recipes(Protocol):
    """Uploaded recipes.  Scope `snapshots`."""

    async def upload(self, caller: Caller, pieces: AsyncIterable[bytes]) -> StoredRecipe:
        """Take a recipe's folder as a plain tar archive; one that is here already stays.

        Raises:
            InvalidRequest: The archive or the recipe holds what it may not; nothing is left of it.
            CapacityError: There is no room for it, or too many are being uploaded.
        """
        ...

    async def get(self, caller: Caller, recipe: UploadedRecipe) -> StoredRecipe:
        """Return an uploaded recipe, which counts as used now."""
        ...

    async def list(self, caller: Caller) -> tuple[RecipeEntry, ...]:
        """Return the operator's recipes, by name."""
        ...


class Images(Protocol):
    """Images.  Scope `snapshots`."""

    def build(self, caller: Caller, recipe: RecipeSource) -> AsyncGenerator[Progress | Image, None]:
        """Build the image of a recipe, unless it is built already; the last event is the image.

        Raises:
            NotFound: There is no such recipe; of a name, the error lists those that there are.
            InvalidRequest: It is a path outside of the operator's folders, or a recipe that says
                what it may not.
            BuildError: It could not be built.
            CapacityError: Too many builds wait already.
        """
        ...


class ImageCache(Protocol):
    """The images that were built.  Scope `read` to look, `snapshots` to remove."""

    async def list(self, caller: Caller) -> tuple[CachedImage, ...]:
        """Return the images of the caller's tenant, the one that was used last first."""
        ...

    async def remove(self, caller: Caller, key: str) -> None:
        """Remove an image.

        Raises:
            NotFound: There is none of this key, for this caller.
            Conflict: A snapshot needs it, or it is in use just now.
        """
        ...


class ImageSnapshots(Protocol):
    """Snapshots of images.  Scope `snapshots`."""

    def for_image(
        self, caller: Caller, request: ImageSnapshotRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Return a ready snapshot of an image, made unless there is one; the last event.

        It is made once, however many ask for it at the same time.  It has no name of its own and
        may be removed for want of room, but not within ten minutes after it was asked for.

        Raises:
            NotFound: There is no such image or recipe.
            BuildError: The image could not be built, or its machine not be baked.
            QuotaExceeded: The tenant may not have so much stored.
            CapacityError: Too many are made, or the disk is full.
        """
        ...


class BuildLinks(Protocol):
    """Results of steps of builds.  Scopes `snapshots` and `run`."""

    async def link(self, caller: Caller, request: BuildLinkRequest) -> Snapshot:
        """Return the result of a step of a build, written from a sandbox unless there is one.

        The sandbox goes on, with the configuration as its programs' defaults.  A result without a
        name may be removed for want of room as long as nothing depends on it, but not within ten
        minutes after it was asked for.

        Raises:
            NotFound: There is no such result, and no sandbox to write it from.
            Conflict: The name is taken, the chain is as long as it may be, or the sandbox does not
                run.
            QuotaExceeded: The tenant may not have so much stored.
            CapacityError: The disk is full; nothing was left on it.
        """
        ...
