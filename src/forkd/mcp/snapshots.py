"""Tools that list, make and delete snapshots."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.mcp import fields
from forkd.mcp.call import Arguments, Call, Result, Toolbox
from forkd.mcp.fields import NO_EFFECT, Snapshot, Tag

box = Toolbox()

Source = Annotated[str, Field(min_length=1, max_length=limits.PATH_BYTES_MAX)]


class ListSnapshots(Arguments):
    """All snapshots."""


class SnapshotList(Result):
    """Snapshots."""

    snapshots: list[Snapshot] = Field(description="By tag.")
    more: int = Field(description="How many others there are.")


@box.tool(ListSnapshots, SnapshotList, reads=True)
async def list_snapshots(call: Call, args: ListSnapshots) -> SnapshotList:  # noqa: ARG001 - it has none
    """List the snapshots that sandboxes can be spawned from."""
    found = await call.client.snapshots.list()
    return SnapshotList(
        snapshots=[fields.snapshot(each) for each in found[: limits.MCP_LISTED_MAX]],
        more=max(0, len(found) - limits.MCP_LISTED_MAX),
    )


class CreateSnapshot(Arguments):
    """A snapshot to make."""

    tag: Tag
    image: Source | None = Field(
        default=None, description="An image of a registry, such as python:3.12-slim."
    )
    recipe: Source | None = Field(default=None, description="Instead of an image: a recipe's name.")
    run: list[Annotated[str, Field(min_length=1, max_length=limits.RUN_LINE_CHARS_MAX)]] = Field(
        default_factory=list,
        max_length=limits.RUN_LINES_MAX,
        description="Shell lines that run in the machine, in order, before it is frozen.",
    )
    memory_mib: int | None = Field(
        default=None,
        ge=limits.MEMORY_MIB_MIN,
        le=limits.MEMORY_MIB_MAX,
        description="Memory of each sandbox of it, an even number.",
    )
    rootfs: Source | None = Field(
        default=None, description="Another server's word for recipe; a recipe's name."
    )
    kernel: Source | None = Field(default=None, description=NO_EFFECT)
    rw: bool = Field(default=False, description=NO_EFFECT)
    tap: str | None = Field(default=None, max_length=64, description=NO_EFFECT)
    boot_wait_secs: int = Field(
        default=limits.BOOT_WAIT_SECS_DEFAULT,
        ge=0,
        le=limits.BOOT_WAIT_SECS_MAX,
        description=NO_EFFECT,
    )


@box.tool(CreateSnapshot, Snapshot)
async def create_snapshot(call: Call, args: CreateSnapshot) -> Snapshot:
    """Build a new snapshot from a container image or a recipe; takes minutes.

    To store the state of a sandbox that runs, use branch_sandbox with a tag instead.
    """
    given = {
        name: value
        for name in ("image", "recipe", "rootfs")
        if (value := getattr(args, name)) is not None
    }
    if len(given) != 1:
        said = " and ".join(given) or "none of them"
        raise InvalidRequest(f"give one of image, recipe and rootfs, not {said}", field="image")
    async with call.steps() as told:
        made = await call.client.snapshots.create(
            args.tag,
            args.recipe or args.rootfs,
            image=args.image,
            run=args.run,
            memory_mib=args.memory_mib,
            on_progress=told,
        )
    return fields.snapshot(made)


class DeleteSnapshot(Arguments):
    """A snapshot to delete."""

    tag: Tag
    cascade: bool = Field(
        default=False, description="Delete the snapshots that depend on it as well."
    )


class Deleted(Result):
    """A snapshot that is gone."""

    tag: str


@box.tool(DeleteSnapshot, Deleted, destroys=True, repeatable=True)
async def delete_snapshot(call: Call, args: DeleteSnapshot) -> Deleted:
    """Delete a stored snapshot; nothing can be spawned from it any more."""
    await call.client.snapshots.delete(args.tag, cascade=args.cascade)
    return Deleted(tag=args.tag)
