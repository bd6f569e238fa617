"""The image cache: what is in it, and what goes when it takes more than it may.

Two kinds of things may go, the one that was used longest ago first: images that no snapshot needs,
and snapshots without a name of their own, of images (`image_snapshots`) and of steps of builds
(`build_links`), as long as no sandbox and no other snapshot goes back to them.  Both stay for
`IMAGE_KEPT_S` after they were used.  What named snapshots need stays, and does not count.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from forkd.errors import Conflict, ForkdError, NotFound
from forkd.model.caller import Scope, Tenant, touch
from forkd.model.image import CachedImage
from forkd.model.snapshot import SnapshotStatus
from forkd.service import images as building
from forkd.service.supervision import TaskKind
from forkd.service.use_case import use_case

if TYPE_CHECKING:
    import builtins
    from collections.abc import Awaitable, Callable

    from forkd.errors import QuotaExceeded
    from forkd.images.inventory import StoredImage
    from forkd.model.caller import Caller
    from forkd.model.snapshot import Snapshot
    from forkd.service.images import Images
    from forkd.service.settings import HostSettings
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.snapshots.upkeep import Upkeep
    from forkd.service.supervision import Supervisor
    from forkd.store.snapshots import SnapshotStore
    from forkd.telemetry.telemetry import Telemetry

log = logging.getLogger(__name__)


class ImageCache:
    """The image cache of one host; `forkd.service.api_images` documents what a caller may ask.

    Args:
        settings: What it may take.
        images: What is in the cache.
        catalog: Which snapshots there are.
        upkeep: Removes those that may go.
        store: Knows when they were last used.
        tasks: Has the cache trimmed after a build.

    Attributes:
        changing: Held by whoever removes snapshots that may go, or is about to use one.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what it works with
        self,
        telemetry: Telemetry,
        settings: HostSettings,
        images: Images,
        catalog: Catalog,
        upkeep: Upkeep,
        store: SnapshotStore,
        tasks: Supervisor,
    ) -> None:
        self.telemetry = telemetry
        self.changing = asyncio.Lock()
        self._images = images
        self._catalog = catalog
        self._upkeep = upkeep
        self._store = store
        self._tasks = tasks
        self._budget_bytes = settings.image_cache_mib << 20
        images.needed = self._needed
        images.on_built = self.trim_soon

    @use_case("list_images", Scope.READ)
    async def list(self, caller: Caller) -> tuple[CachedImage, ...]:
        """Return the caller's images, the one that was used last first."""
        found = await self._images.stored()
        return tuple(
            self._shown(caller, each) for each in reversed(found) if _may_see(caller, each)
        )

    @use_case("remove_image", Scope.SNAPSHOTS)
    async def remove(self, caller: Caller, key: str) -> None:
        """Remove an image that no snapshot needs."""
        asked_at_s = time.time()
        found = {each.key: each for each in await self._images.stored()}
        image = found.get(key)
        if image is None or not _may_see(caller, image):
            raise NotFound(f"no image {key!r}", image=key)
        touch(key)
        if users := [each.tag for each in self._users(key)]:
            raise Conflict(
                f"image {key} is needed by {self._catalog.named(caller, users)}; delete those "
                "snapshots first",
                image=key,
            )
        if not await self._images.remove(key, unused_since_s=asked_at_s):
            raise Conflict(f"image {key} is being built, or was just used; try again", image=key)

    def trim_soon(self) -> None:
        """Have the cache trimmed, without waiting for it."""
        self._tasks.run(TaskKind.DELETE, self._trim_or_log(), "image cache")

    async def trim(self, *, tenant: Tenant | None = None, at_least_one: bool = False) -> bool:
        """Remove what may go until the cache takes no more than it may.

        Args:
            tenant: Remove only this one's; None for everybody's.
            at_least_one: Remove one thing even if there is room.

        Returns:
            Whether anything was removed.
        """
        removed = False
        async with self.changing:
            while at_least_one or await self._taken_bytes() > self._budget_bytes:
                if not await self._remove_one(tenant):
                    break
                removed, at_least_one = True, False
        return removed

    async def make_room(self, tenant: Tenant, error: QuotaExceeded) -> None:
        """Remove one thing of a tenant that may have no more snapshots stored.

        Raises:
            QuotaExceeded: It is another quota, or nothing may go: `error` itself.
        """
        ours = error.context.get("quota") == "snapshot_mib"
        if not ours or not await self.trim(tenant=tenant, at_least_one=True):
            raise error

    async def _trim_or_log(self) -> None:
        try:
            await self.trim()
        except ForkdError as error:
            log.warning("image cache not trimmed", extra={"error": str(error)})

    async def _taken_bytes(self) -> int:
        known = self._catalog.shelf.known.values()
        named = {each.image_key for each in known if not each.cached}
        needed = {
            under.tag
            for each in known
            if not each.cached
            for under in self._catalog.shelf.ancestors(each)
        }
        images = await self._images.stored()
        may_go = (each for each in known if each.cached and each.tag not in needed)
        return sum(each.stored_bytes for each in may_go) + sum(
            each.stored_bytes for each in images if each.key not in named
        )

    async def _remove_one(self, tenant: Tenant | None) -> bool:
        """Remove what was used longest ago of what may go; return whether there was anything."""
        unused_since_s = time.time() - building.IMAGE_KEPT_S
        for used_at_s, remove in await self._candidates(tenant, unused_since_s):
            if used_at_s > unused_since_s:
                break
            if await remove():
                return True
        return False

    async def _candidates(
        self, tenant: Tenant | None, unused_since_s: float
    ) -> builtins.list[tuple[float, Callable[[], Awaitable[bool]]]]:
        """Return when each thing was last used that may go, oldest first, and what removes it."""
        found: builtins.list[tuple[float, Callable[[], Awaitable[bool]]]] = []
        for tag in tuple(self._catalog.shelf.known):
            if self._upkeep.may_evict(tag) and tenant in {None, self._catalog.tenant_of(tag)}:
                used_at_s = await asyncio.to_thread(self._store.cached_used_at_s, tag)
                found.append((used_at_s or 0.0, partial(self._upkeep.evict, tag)))
        needed = self._needed()
        for each in () if needed is None else await self._images.stored():
            if each.key not in (needed or ()) and tenant in {None, Tenant(each.tenant)}:
                remove = partial(self._images.remove, each.key, unused_since_s=unused_since_s)
                found.append((each.used_at_s, remove))
        return sorted(found, key=lambda each: each[0])

    def _needed(self) -> frozenset[str] | None:
        """Return which images snapshots need; None if one is damaged, so that nobody knows."""
        shelf = self._catalog.shelf
        keys = shelf.image_keys() | {each.snapshot.image_key for each in shelf.writing.values()}
        damaged = any(each.status is SnapshotStatus.FAILED for each in shelf.known.values())
        return None if damaged and "" in keys else frozenset(keys)

    def _users(self, key: str) -> builtins.list[Snapshot]:
        return [each for each in self._catalog.stored() if each.image_key == key]

    def _shown(self, caller: Caller, image: StoredImage) -> CachedImage:
        users = [each for each in self._users(image.key) if caller.may_touch(each.owner)]
        reference, at, digest = (image.reference or "").partition("@")
        return CachedImage(
            key=image.key,
            name=image.name,
            tenant=Tenant(image.tenant),
            reference=image.reference and reference,
            digest=digest if at else None,
            stored_bytes=image.stored_bytes,
            used_at_s=image.used_at_s,
            snapshots=tuple(each.tag for each in users),
        )


def _may_see(caller: Caller, image: StoredImage) -> bool:
    return caller.is_admin or image.tenant == caller.tenant
