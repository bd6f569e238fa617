"""Results of steps of builds: found by their keys, or written from the sandbox of the step.

A key names a step and all before it, among those of one tenant.  A result that nobody has named
is a cached snapshot, as those of images are (`image_snapshots`): it stays for as long as there is
room, or another snapshot depends on it.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.engine import guest_bake
from forkd.engine.guest_bake import GuestDefaults
from forkd.errors import Conflict, NotFound, QuotaExceeded
from forkd.limits import SANDBOX_ENV_BYTES_MAX, WRITING_WAIT_S
from forkd.model.caller import Scope
from forkd.model.exec import check_variables
from forkd.model.ids import parse_tag
from forkd.model.snapshot import CACHED_DIGITS, CACHED_PREFIX, BuiltLink, SnapshotStatus
from forkd.service.use_case import use_case

if TYPE_CHECKING:
    from forkd.model.caller import Caller, Tenant
    from forkd.model.ids import SandboxId, Tag
    from forkd.model.snapshot import BuildLinkRequest, Snapshot
    from forkd.service.image_cache import ImageCache
    from forkd.service.sandboxes.roster import Roster
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.trees.branches import Branches
    from forkd.store.snapshots import SnapshotStore
    from forkd.telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class BuildLinks:
    """Results of steps of one host; `forkd.service.api_images` documents what it is asked.

    Attributes:
        roster: The sandboxes of steps.
        branches: Writes them down.
        cache: Removes others to make room.
        catalog: Which snapshots there are.
        store: Notes when they were used.
    """

    telemetry: Telemetry
    roster: Roster
    branches: Branches
    cache: ImageCache
    catalog: Catalog
    store: SnapshotStore

    @use_case("build_link", Scope.SNAPSHOTS, Scope.RUN)
    async def link(self, caller: Caller, request: BuildLinkRequest) -> Snapshot:
        """Return the result of a step, written unless there is one."""
        check_variables(request.config.env, SANDBOX_ENV_BYTES_MAX)
        tag = request.tag or _tag_of(caller.tenant, request.key)
        while (found := await self._found(caller, tag, request)) is None:
            if request.sandbox is None:
                raise NotFound(f"no step of a build has the key {request.key}", key=request.key)
            write = None if request.tag else self.catalog.shelf.writing.get(tag)
            if write is None:
                return await self._write(caller, request.sandbox, tag, request)
            try:
                async with asyncio.timeout(WRITING_WAIT_S):
                    await write.ended.wait()
            except TimeoutError:
                words = f"another build has been writing step {request.key} for too long"
                raise Conflict(words, tag=tag) from None
        return found

    async def _found(self, caller: Caller, tag: Tag, request: BuildLinkRequest) -> Snapshot | None:
        """Return the result if it is there, used from now on."""
        async with self.cache.changing:
            known = self.catalog.shelf.known.get(tag)
            if known is None or known.build_key != request.key:
                return None
            if known.status is not SnapshotStatus.READY or self.catalog.shelf.is_locked(tag):
                return None
            if not caller.may_touch((found := self.catalog.get(tag)).owner):
                return None
            if found.cached:
                await asyncio.to_thread(self.store.touch_cached, tag)
            return found

    async def _write(
        self, caller: Caller, sandbox: SandboxId, tag: Tag, request: BuildLinkRequest
    ) -> Snapshot:
        config = request.config
        guest = self.roster.get(caller, sandbox).running_guest()
        await guest_bake.configure(guest, GuestDefaults(config.env, config.cwd, config.user))
        built = BuiltLink(request.key, config, cached=request.tag is None)
        while True:
            try:
                made = await self.branches.write_built(caller, sandbox, tag, built)
            except QuotaExceeded as error:
                await self.cache.make_room(caller.tenant, error)
            else:
                self.cache.trim_soon()
                return made


def _tag_of(tenant: Tenant, key: str) -> Tag:
    """Return what a result is called that nobody has named."""
    digest = hashlib.sha256(f"{tenant}\n{key}".encode()).hexdigest()[:CACHED_DIGITS]
    return parse_tag(f"{CACHED_PREFIX}{digest}")
