"""Images of `fake_service`: the cache has what was put into it, and each has a snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from forkd.errors import Conflict, NotFound
from forkd.model.caller import DEFAULT_TENANT, Scope
from forkd.model.ids import Tag
from forkd.model.image import CachedImage
from forkd.model.progress import Progress
from tests.support.fake_history import MIB

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from forkd.model.caller import Caller
    from forkd.model.image import ImageSnapshotRequest
    from forkd.model.snapshot import BuildLinkRequest, Snapshot

KEY, NEEDED = "0" * 32, "1" * 32


class FakeImageCache:
    """Two images, of which a snapshot needs one."""

    def __init__(self) -> None:
        self.images = {
            KEY: CachedImage(
                key=KEY,
                name="python",
                tenant=DEFAULT_TENANT,
                reference="docker.io/library/python",
                digest=f"sha256:{'0' * 64}",
                stored_bytes=200 * MIB,
                used_at_s=1_700_000_000.0,
                snapshots=(),
            ),
            NEEDED: CachedImage(
                key=NEEDED,
                name="numpy",
                tenant=DEFAULT_TENANT,
                reference=None,
                digest=None,
                stored_bytes=300 * MIB,
                used_at_s=1_600_000_000.0,
                snapshots=(Tag("numpy"),),
            ),
        }

    async def list(self, caller: Caller) -> tuple[CachedImage, ...]:
        caller.require(Scope.READ)
        return tuple(self.images.values())

    async def remove(self, caller: Caller, key: str) -> None:
        caller.require(Scope.SNAPSHOTS)
        if key not in self.images:
            raise NotFound(f"no image {key!r}", image=key)
        if self.images[key].snapshots:
            raise Conflict(f"image {key} is needed by numpy; delete those snapshots first")
        del self.images[key]


class FakeImageSnapshots:
    """A snapshot of each image, kept by `make`; `asked` has what was asked for."""

    def __init__(self, make: Callable[[str], Snapshot]) -> None:
        self.asked: list[ImageSnapshotRequest] = []
        self._make = make

    async def for_image(
        self, caller: Caller, request: ImageSnapshotRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        caller.require(Scope.SNAPSHOTS)
        self.asked.append(request)
        if "nothing" in str(request.image):
            raise NotFound(f"no image {request.image}: there is none", image=str(request.image))
        yield Progress("resolve", None, f"asking for {request.image}")
        yield self._make(f"image-{len(self.asked):012x}")


class FakeBuildLinks:
    """Results of steps of builds, kept by `make`; `made` has them by their keys."""

    def __init__(self, make: Callable[[str], Snapshot]) -> None:
        self.made: dict[str, Snapshot] = {}
        self._make = make

    async def link(self, caller: Caller, request: BuildLinkRequest) -> Snapshot:
        caller.require(Scope.SNAPSHOTS)
        caller.require(Scope.RUN)
        if request.key not in self.made:
            if request.sandbox is None:
                raise NotFound(f"no step of a build has the key {request.key}", key=request.key)
            made = self._make(request.tag or f"image-{request.key[:12]}")
            made = replace(made, build_key=request.key, config=request.config)
            self.made[request.key] = replace(made, cached=request.tag is None)
        return self.made[request.key]
