"""Requests and answers about images and recipes; the rules are those of `v2`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forkd.wire.parts import Answer, DiskMib, ImageName, MemoryMib, Request, Vcpus


class ImageSnapshot(Request):
    """Return a snapshot of an image, made unless there is one."""

    image: ImageName
    memory_mib: MemoryMib | None = Field(
        default=None, description="Memory of each fork, an even number."
    )
    vcpus: Vcpus | None = Field(default=None, description="Virtual CPUs of each fork.")
    disk_mib: DiskMib | None = Field(default=None, description="Disk size of each fork.")
    pull: Literal["missing", "always"] = Field(
        default="missing",
        description="`always`: ask the registry for the image that the tag names now. `missing`: "
        "use the image that it named when it was last asked for, if that is still here.",
    )


class CachedImageInfo(Answer):
    """One image in the cache."""

    key: str = Field(description="Names the contents.")
    name: str
    reference: str | None = Field(
        description="Registry and repository that it came from; null for any other image."
    )
    digest: str | None = Field(description="Its digest there.")
    bytes: int = Field(description="What it takes on disk.")
    last_used_unix: int
    snapshots: list[str] = Field(
        description="Snapshots that need it; it cannot be deleted before them."
    )
    tenant: str


class HostRecipe(Answer):
    """One recipe in the operator's folders."""

    name: str = Field(description="What a request names it by.")
    description: str
    error: str | None = Field(default=None, description="Why it cannot be used.")
    base: str | None = Field(
        default=None, description="The recipe that it is baked over; null for none."
    )
