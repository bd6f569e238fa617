"""What a daemon holds: snapshots, images, sandboxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from forkd.sdk._async.packs import AsyncPacks
from forkd.sdk._async.recipes import image_snapshot
from forkd.sdk._async.sandbox import sandbox_of
from forkd.sdk._requests import build, explicit, shell_lines
from forkd.wire.v2 import (
    ImageBuild,
    ImageEvent,
    ImageInfo,
    ProgressEvent,
    SandboxInfo,
    SnapshotCompact,
    SnapshotCreate,
    SnapshotEvent,
    SnapshotGc,
    SnapshotGcInfo,
    SnapshotInfo,
    SnapshotInfoDetail,
)
from forkd.wire.v2_images import CachedImageInfo, ImageSnapshot
from forkd.wire.v2_rights import SnapshotShare

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from os import PathLike

    from forkd.sdk._async.http import AsyncHttp
    from forkd.sdk._async.recipes import AsyncRecipes
    from forkd.sdk._async.sandbox import AsyncSandbox
    from forkd.sdk._image import Image
    from forkd.wire.v2 import SandboxCondition

WRITE_TIMEOUT_S = 3_600.0
"""Time that writing or removing snapshots may take."""

_IMAGES = TypeAdapter(list[CachedImageInfo])
_SNAPSHOTS = TypeAdapter(list[SnapshotInfo])
_SANDBOXES = TypeAdapter(list[SandboxInfo])


PAGE_SIZE = 100
"""How many elements of a list one request asks for, unless the caller says otherwise."""


class AsyncSnapshots(AsyncPacks):
    """The snapshots of a daemon."""

    def __init__(self, http: AsyncHttp, recipes: AsyncRecipes) -> None:
        self._http = http
        self._recipes = recipes

    @explicit
    async def create(  # noqa: PLR0913 - one for each member
        self,
        tag: str,
        recipe: str | PathLike[str] | Image | None = None,
        *,
        image: str | PathLike[str] | Image | None = None,
        run: Sequence[str] = (),
        ready: str | None = None,
        memory_mib: int | None = None,
        vcpus: int | None = None,
        disk_mib: int | None = None,
        on_progress: Callable[[ProgressEvent], object] | None = None,
    ) -> SnapshotInfo:
        """Bake a snapshot of an image or a recipe; returns when it is ready.

        Leaving before that, by a cancellation say, ends the bake and removes what it made.

        Args:
            tag: Its name.
            recipe: A recipe's folder or TOML file on this host, which is uploaded; or the name of
                a recipe of the daemon's host, or a path in one of its folders of recipes.
            image: Instead of a recipe: an image of a registry, such as `python:3.12-slim`; the path
                of an OCI layout folder, an OCI archive or a `docker save` archive on this host,
                which is uploaded; a recipe; or an `Image`.
            run: Shell lines that run in the machine, in order, before it is frozen. The machine has
                no network.
            ready: Shell command that is repeated until it exits with 0; the machine is frozen then.
            memory_mib: Memory of each fork, an even number.
            vcpus: Virtual CPUs of each fork.
            disk_mib: Disk size of each fork.
            on_progress: Called with each step, as it comes.

        Raises:
            NotFound: There is no such recipe or image.
            InvalidRequest: The recipe says what it may not, or its folder holds too much.
            Conflict: A snapshot of that tag exists, or is being baked.
            BuildError: The image, a line to run or the warm-up failed.
        """
        request = build(
            SnapshotCreate,
            tag=tag,
            recipe=None if recipe is None else await self._recipes.reference(recipe, on_progress),
            image=None
            if image is None
            else await self._recipes.image_reference(image, on_progress),
            run=shell_lines(run),
            ready=ready,
            memory_mib=memory_mib,
            vcpus=vcpus,
            disk_mib=disk_mib,
        )
        event = await self._http.events("/v2/snapshots", request, SnapshotEvent, on_progress)
        return event.snapshot

    @explicit
    async def for_image(  # noqa: PLR0913 - one for each member
        self,
        image: str | PathLike[str] | Image,
        *,
        memory_mib: int | None = None,
        vcpus: int | None = None,
        disk_mib: int | None = None,
        pull: Literal["missing", "always"] = "missing",
        on_progress: Callable[[ProgressEvent], object] | None = None,
    ) -> SnapshotInfo:
        """Return a ready snapshot of an image, baked the first time that it is asked for.

        The snapshot has no name of its own. The daemon removes it when its image cache is full and
        no sandbox uses it, but not within ten minutes after it was asked for.

        Args:
            image: As of `create`.
            memory_mib: Memory of each fork, an even number.
            vcpus: Virtual CPUs of each fork.
            disk_mib: Disk size of each fork.
            pull: `"always"` asks the registry which image the tag names now; `"missing"` uses the
                one that it named last, if that is still in the daemon's cache.
            on_progress: Called with each step, as it comes; not called for one that is ready.

        Raises:
            NotFound: There is no such image.
            BuildError: It could not be built, or its machine not be baked.
        """
        request = build(
            ImageSnapshot,
            image=await self._recipes.image_reference(image, on_progress),
            memory_mib=memory_mib,
            vcpus=vcpus,
            disk_mib=disk_mib,
            pull=pull,
        )
        return await image_snapshot(self._http, request, on_progress)

    @explicit
    async def link(  # noqa: PLR0913 - one for each member
        self,
        tag: str,
        source: str,
        *,
        exec: str | None = None,  # noqa: A002 - the word for it
        exec_timeout_s: float | None = None,
        network: bool | str | builtins.list[str] | None = None,
        wait: bool = True,
        on_progress: Callable[[ProgressEvent], object] | None = None,
    ) -> SnapshotInfo:
        """Write down a sandbox, or a fork of a snapshot in which a command has run.

        Only what differs from the snapshot under it is stored.

        Args:
            tag: Its name.
            source: Id of a running sandbox, which goes on; or a snapshot, with `exec`.
            exec: What `sh` runs in the fork, which is ended afterwards.
            exec_timeout_s: Time that this may take.
            network: What the fork may reach meanwhile, as of `Client.fork`.
            wait: Whether to return when the snapshot is ready, or while it is being written.
            on_progress: Called with each step, and each line that the command prints.

        Raises:
            Conflict: The tag is taken, the chain is as long as it may be, or the source does
                not run.
            BuildError: The command failed; the end of what it printed is in the message.
            CapacityError: The disk is full; nothing was left on it.
        """
        request = build(
            SnapshotCreate,
            tag=tag,
            source=source,
            exec=exec,
            exec_timeout_secs=exec_timeout_s,
            network=network,
            wait=wait,
        )
        event = await self._http.events("/v2/snapshots", request, SnapshotEvent, on_progress)
        return event.snapshot

    async def list(self) -> builtins.list[SnapshotInfo]:
        """Return every snapshot, by tag."""
        return await self._http.call(_SNAPSHOTS, "GET", "/v2/snapshots")

    async def info(self, tag: str) -> SnapshotInfoDetail:
        """Return one snapshot, with what it depends on and what depends on it."""
        return await self._http.call(
            SnapshotInfoDetail, "GET", f"/v2/snapshots/{self._http.quoted(tag)}/info"
        )

    async def delete(self, tag: str, *, cascade: bool = False, force: bool = False) -> None:
        """Remove a snapshot and its files.

        Args:
            tag: Its name.
            cascade: Remove those that depend on it as well, all or nothing.
            force: Remove it from under those that depend on it, which are lost.

        Raises:
            Conflict: Sandboxes or other snapshots need it.
        """
        query = {name: "true" for name, on in (("cascade", cascade), ("force", force)) if on}
        path = f"/v2/snapshots/{self._http.quoted(tag)}"
        await self._http.send("DELETE", path, query=query, timeout_s=WRITE_TIMEOUT_S)

    async def share(self, tag: str, *, shared: bool) -> SnapshotInfo:
        """Let every tenant use a snapshot, or only its own again.

        Args:
            tag: Its name.
            shared: Whether every tenant may use it.

        Raises:
            NotFound: There is no such snapshot.
            Forbidden: It is another tenant's.
        """
        body = SnapshotShare(shared=shared)
        path = f"/v2/snapshots/{self._http.quoted(tag)}/shared"
        return await self._http.call(SnapshotInfo, "PUT", path, body=body)

    async def compact(self, tag: str, to: str | None = None) -> SnapshotInfo:
        """Write a snapshot so that it needs no other, in its place or under the name `to`.

        Raises:
            Conflict: It is not ready, `to` is taken, or, in its place, it is in use.
            CapacityError: The disk is full; nothing was changed.
        """
        return await self._http.call(
            SnapshotInfo,
            "POST",
            f"/v2/snapshots/{self._http.quoted(tag)}/compact",
            body=build(SnapshotCompact, to=to),
            creates=True,
            timeout_s=WRITE_TIMEOUT_S,
        )

    async def gc(self, *, dry_run: bool = False) -> SnapshotGcInfo:
        """Remove what is unused, and return what that was.

        Args:
            dry_run: Remove nothing; only return what would be removed.
        """
        return await self._http.call(
            SnapshotGcInfo,
            "POST",
            "/v2/snapshots:gc",
            body=build(SnapshotGc, dry_run=dry_run),
            timeout_s=WRITE_TIMEOUT_S,
        )


class AsyncImages:
    """The images of a daemon."""

    def __init__(self, http: AsyncHttp, recipes: AsyncRecipes) -> None:
        self._http = http
        self._recipes = recipes

    async def build(
        self,
        recipe: str | PathLike[str] | Image,
        *,
        on_progress: Callable[[ProgressEvent], object] | None = None,
    ) -> ImageInfo:
        """Build the image of a recipe, unless it is built already.

        Args:
            recipe: As for `snapshots.create`, or an `Image`.
            on_progress: Called with each step, as it comes.

        Raises:
            NotFound: There is no such recipe.
            BuildError: It could not be built.
        """
        named = await self._recipes.reference(recipe, on_progress)
        request = build(ImageBuild, recipe=named)
        event = await self._http.events("/v2/images", request, ImageEvent, on_progress)
        return event.image

    async def list(self) -> builtins.list[CachedImageInfo]:
        """Return the images in the cache, the one that was used last first."""
        return await self._http.call(_IMAGES, "GET", "/v2/images")

    async def remove(self, key: str) -> None:
        """Remove an image from the cache.

        Args:
            key: Its key, as `list` has it.

        Raises:
            NotFound: There is no such image.
            Conflict: A snapshot needs it.
        """
        path = f"/v2/images/{self._http.quoted(key)}"
        await self._http.send("DELETE", path, timeout_s=WRITE_TIMEOUT_S)


class AsyncSandboxCollection:
    """The sandboxes of a daemon."""

    def __init__(self, http: AsyncHttp) -> None:
        self._http = http

    @explicit
    async def list(
        self,
        tag: str | None = None,
        *,
        name: str | None = None,
        status: SandboxCondition | None = None,
        labels: Mapping[str, str | None] | None = None,
    ) -> builtins.list[AsyncSandbox]:
        """Return the sandboxes that are all of this, the oldest first.

        Args:
            tag: Forked from this snapshot.
            name: Of this name.
            status: "starting", "running", "paused", "stopping" or "exited".
            labels: With these labels; None for any value.
        """
        query = _filters(tag, name, status, labels)
        found = await self._http.call(_SANDBOXES, "GET", "/v2/sandboxes", query=query)
        return [sandbox_of(self._http, each) for each in found]

    @explicit
    async def iterate(
        self,
        tag: str | None = None,
        *,
        name: str | None = None,
        status: SandboxCondition | None = None,
        labels: Mapping[str, str | None] | None = None,
        page_size: int = PAGE_SIZE,
    ) -> AsyncIterator[AsyncSandbox]:
        """Yield what `list` returns, asking for one part of the list after the other.

        Args:
            tag: Forked from this snapshot.
            name: Of this name.
            status: "starting", "running", "paused", "stopping" or "exited".
            labels: With these labels; None for any value.
            page_size: How many sandboxes one request asks for.
        """
        query = {**_filters(tag, name, status, labels), "limit": page_size}
        while True:
            found, after = await self._http.page(_SANDBOXES, "/v2/sandboxes", query)
            for each in found:
                yield sandbox_of(self._http, each)
            if after is None:
                return
            query["after"] = after

    async def get(self, id: str) -> AsyncSandbox:  # noqa: A002 - the word for it
        """Return one sandbox, by its id, a beginning that no other has, or its name.

        Raises:
            NotFound: There is none.
            InvalidRequest: Several ids begin so; the message names some.
        """
        info = await self._http.call(SandboxInfo, "GET", f"/v2/sandboxes/{self._http.quoted(id)}")
        return sandbox_of(self._http, info)


def _filters(
    tag: str | None, name: str | None, status: str | None, labels: Mapping[str, str | None] | None
) -> dict[str, Any]:
    wanted = [key if value is None else f"{key}={value}" for key, value in (labels or {}).items()]
    return {"snapshot_tag": tag, "name": name, "status": status, "label": wanted or None}
