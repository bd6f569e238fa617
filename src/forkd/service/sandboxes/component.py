"""Fork, list and end sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.engine.control import Control
from forkd.errors import ForkdError, NotFound
from forkd.limits import (
    FORK_DEADLINE_S_MAX,
    FORK_DEADLINE_S_MIN,
    LOG_FOLLOWERS_MAX,
    SHORT_RETRY_S,
)
from forkd.model.caller import Scope
from forkd.model.checks import in_range
from forkd.model.event import EventKind
from forkd.model.filters import EVERY_SANDBOX
from forkd.model.ids import (
    SandboxId,
    SandboxName,
    is_sandbox_id,
    may_begin_sandbox_id,
    parse_sandbox_ref,
    parse_sandbox_start,
)
from forkd.model.sandbox import SandboxState, check_fork_count
from forkd.model.tenant import Amounts
from forkd.service import seeds
from forkd.service.allowance import guest_memory_bytes
from forkd.service.ledger import amounts_of, seed_key
from forkd.service.places import Places
from forkd.service.sandboxes import console
from forkd.service.sandboxes.forking import Forks, Origin
from forkd.service.sandboxes.identity import identity_of
from forkd.service.sandboxes.lifecycle import LifeEvent, check
from forkd.service.sandboxes.owner import OwnerTools, SandboxOwner
from forkd.service.sandboxes.pausing import Pausing
from forkd.service.supervision import TaskKind, to_end
from forkd.service.use_case import streaming_use_case, use_case

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable

    from forkd.model.caller import Caller, Owner
    from forkd.model.filters import SandboxFilter
    from forkd.model.ids import Tag
    from forkd.model.sandbox import ForkOptions, ForkResult, NewLimits, Sandbox, SandboxChange
    from forkd.service.admission import Admission
    from forkd.service.clock import WallClock
    from forkd.service.introduction import Introduction
    from forkd.service.journal import Journal
    from forkd.service.leases import Lease, Leases
    from forkd.service.ledger import Ledger
    from forkd.service.records import Records
    from forkd.service.sandboxes.roster import Roster
    from forkd.service.settings import HostSettings
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.supervision import Supervisor
    from forkd.service.zygotes import ZygotePool
    from forkd.store.database import SandboxRow
    from forkd.telemetry.telemetry import Telemetry

NAMING_SCOPES = frozenset({Scope.READ, Scope.RUN, Scope.SNAPSHOTS})
"""Who has one of these may say a sandbox's name; what it may do with the sandbox is asked later."""

log = logging.getLogger(__name__)


@dataclass
class Sandboxes:
    """The sandboxes of one host; `forkd.service.api.Sandboxes` documents what a caller may ask.

    Attributes:
        forks: Forks more of them.
        log_followers: The places of those who follow consoles.
    """

    telemetry: Telemetry
    settings: HostSettings
    tasks: Supervisor
    records: Records
    admission: Admission
    leases: Leases
    ledger: Ledger
    journal: Journal
    roster: Roster
    catalog: Catalog
    zygotes: ZygotePool
    introduction: Introduction
    clock: WallClock
    forks: Forks = field(init=False)
    log_followers: Places = field(
        default_factory=lambda: Places("followed consoles", LOG_FOLLOWERS_MAX, SHORT_RETRY_S)
    )
    _owner_tools: OwnerTools = field(init=False)
    _pausing: Pausing = field(init=False)

    def __post_init__(self) -> None:
        self._pausing = Pausing(self.records, self.journal)
        self.forks = Forks(
            self.telemetry,
            self.admission,
            self.settings,
            self.records,
            self.leases,
            self.ledger,
            self.journal,
            self.roster,
            self.introduction,
            self._own,
        )
        self._owner_tools = OwnerTools(
            self.records,
            self.leases,
            self.journal,
            self.clock,
            gone=self._note_gone,
            exited=self._note_exit,
        )

    @use_case("fork", Scope.RUN)
    async def fork(self, caller: Caller, tag: Tag, count: int, options: ForkOptions) -> ForkResult:
        """Fork sandboxes."""
        check_fork_count(count, options.name)
        self.introduction.vault.check(caller.tenant, options.secrets)
        await self.catalog.usable(caller, tag, wait=options.wait)
        return await self.tasks.finish(
            TaskKind.FORK,
            self._fork(caller.owner, tag, count, options),
            f"{count} of {tag}",
            undo=lambda result: self.delete_all(each.id for each in result.sandboxes),
        )

    @use_case("list_sandboxes", Scope.READ)
    async def list(
        self, caller: Caller, wanted: SandboxFilter = EVERY_SANDBOX
    ) -> tuple[Sandbox, ...]:
        """Return every sandbox that is wanted."""
        return wanted.of(self.roster.visible(caller))

    @use_case("get_sandbox", Scope.READ)
    async def get(self, caller: Caller, sandbox: SandboxId) -> Sandbox:
        """Return one sandbox."""
        return self.roster.get(caller, sandbox).sandbox

    @use_case("find_sandbox", Scope.READ)
    async def find(self, caller: Caller, start: str) -> Sandbox:
        """Return the one sandbox that is so named, or whose id begins so."""
        if is_sandbox_id(start):
            return self.roster.get(caller, SandboxId(start)).sandbox
        ref = parse_sandbox_ref(start)
        named = self.roster.find_by_name(caller.tenant, SandboxName(ref))
        if named is not None:
            return self.roster.get(caller, named.sandbox.id).sandbox
        if not may_begin_sandbox_id(start):
            raise _not_named(ref)
        try:
            return self.roster.find_by_start(caller, parse_sandbox_start(start)).sandbox
        except NotFound:
            words = f"no sandbox is named {start}, and no id begins so"
            raise NotFound(words, sandbox=start) from None

    async def named(self, caller: Caller, ref: SandboxId | SandboxName) -> SandboxId:
        """Return the id of the sandbox that is so named; an id is returned as it is."""
        if is_sandbox_id(ref):
            return SandboxId(ref)
        if not caller.is_admin and not caller.scopes & NAMING_SCOPES:
            caller.require(Scope.READ)
        found = self.roster.find_by_name(caller.tenant, SandboxName(ref))
        if found is None:
            raise _not_named(ref)
        return found.sandbox.id

    @use_case("delete_sandbox", Scope.RUN)
    async def delete(self, caller: Caller, sandbox: SandboxId) -> None:
        """End a sandbox."""
        await self.roster.get(caller, sandbox).delete()

    @use_case("reset", Scope.RUN)
    async def reset(self, caller: Caller, sandbox: SandboxId, *, deadline_s: float) -> float:
        """Take a sandbox back to its fork point, in place; return how long, in milliseconds."""
        in_range("deadline_s", deadline_s, FORK_DEADLINE_S_MIN, FORK_DEADLINE_S_MAX)
        return await to_end(self._reset(self.roster.get(caller, sandbox), deadline_s))

    @use_case("set_limits", Scope.RUN)
    async def set_limits(self, caller: Caller, sandbox: SandboxId, limits: NewLimits) -> Sandbox:
        """Change what a running sandbox may take of the host."""
        return await to_end(self._set_limits(self.roster.get(caller, sandbox), limits))

    @use_case("change_sandbox", Scope.RUN)
    async def change(self, caller: Caller, sandbox: SandboxId, change: SandboxChange) -> Sandbox:
        """Change a sandbox's name, labels or time to live."""
        return await to_end(self._change(self.roster.get(caller, sandbox), change))

    @use_case("pause", Scope.RUN)
    async def pause(self, caller: Caller, sandbox: SandboxId) -> Sandbox:
        """Stop a sandbox's vCPUs and keep its memory."""
        return await to_end(self._pausing.pause(self.roster.get(caller, sandbox)))

    @use_case("resume", Scope.RUN)
    async def resume(self, caller: Caller, sandbox: SandboxId) -> Sandbox:
        """Have a paused sandbox go on."""
        return await to_end(self._pausing.resume(self.roster.get(caller, sandbox)))

    @use_case("console_log", Scope.READ)
    async def console_log(self, caller: Caller, sandbox: SandboxId) -> bytes:
        """Return the end of what the guest wrote to its console."""
        directory = self.roster.get(caller, sandbox).lease.directory
        return await asyncio.to_thread(console.read, directory)

    @streaming_use_case("follow_console_log", Scope.READ)
    async def follow_console_log(
        self, caller: Caller, sandbox: SandboxId
    ) -> AsyncGenerator[bytes, None]:
        """Yield the console log as it grows."""
        owner = self.roster.get(caller, sandbox)

        def alive() -> bool:
            return owner.sandbox.state.has_machine

        with self.log_followers.take(caller), owner.guest.used():
            async with contextlib.aclosing(console.follow(owner.lease.directory, alive)) as pieces:
                async for piece in pieces:
                    yield piece

    def adopt(self, row: SandboxRow) -> SandboxOwner:
        """Own a sandbox that an earlier daemon forked."""
        lease = self.leases.adopt(row)
        lease.seed = seeds.retired_of(row.sandbox.pid)
        owner = SandboxOwner(row.sandbox, lease, self._owner_tools, renaming=row.renaming)
        return self._run(owner)

    async def delete_all(self, sandboxes: Iterable[SandboxId]) -> None:
        """Delete many sandboxes at once; those that are gone are fine, failures are logged."""
        owners = filter(None, map(self.roster.find, sandboxes))
        await asyncio.gather(*map(self._delete_quietly, owners))

    async def _fork(self, owner: Owner, tag: Tag, count: int, options: ForkOptions) -> ForkResult:
        # Checked again, with nothing between this and the lease, which is noticed.
        snapshot = self.catalog.get_ready(tag)
        with self.roster.naming(owner.tenant, options.name):
            async with self.zygotes.lease(tag) as zygote:
                origin = Origin(snapshot, part=self.zygotes.part(tag))
                async with self.forks.prepare(owner, origin, count, options) as batch:
                    await batch.fork(zygote)
                    return await batch.keep()

    async def _reset(self, owner: SandboxOwner, deadline_s: float) -> float:
        async with owner.exclusive("reset") as found:
            check(found, LifeEvent.RESET)
            owner.guest.close()
            snapshot = self.catalog.shelf.find(found.tag)
            identity = identity_of(found, owner.lease.slot, snapshot)
            async with await Control.connect(owner.control) as control:
                took_ms = await control.reset(identity, deadline_s=deadline_s)
            if (use := found.use) is not None:  # its instant was before it was told
                await self.introduction.give(owner.guest, use)
        self.journal.note(EventKind.SANDBOX_RESET, found.id, found.owner, took_ms=took_ms)
        return took_ms

    async def _set_limits(self, owner: SandboxOwner, limits: NewLimits) -> Sandbox:
        async with owner.exclusive("limit") as found:
            check(found, LifeEvent.LIMIT)
            limited = limits.of(found)
            with self._promised(owner, limited):
                await self._limit(owner, found, limited)
                owner.sandbox = limited
            await self.records.put([owner.row])
        return limited

    async def _change(self, owner: SandboxOwner, change: SandboxChange) -> Sandbox:
        async with owner.exclusive("change") as found:
            check(found, LifeEvent.CHANGE)
            changed = change.of(found, datetime.now(UTC), self.settings.sandbox_ttl_s)
            renamed = changed.name != found.name
            with self.roster.naming(found.owner.tenant, changed.name if renamed else None):
                await self.records.put([replace(owner.row, sandbox=changed)])
                owner.sandbox = changed
                self.roster.rename(owner, found.name)
            owner.watch_expiry()
        return changed

    async def _limit(self, owner: SandboxOwner, before: Sandbox, limited: Sandbox) -> None:
        """Limit host and guest; the guest gets less before the host does, and more after it."""
        snapshot = self.catalog.shelf.find(limited.tag)
        had, has = guest_memory_bytes(before, snapshot), guest_memory_bytes(limited, snapshot)
        if has is not None and (had is None or has < had):
            await _limit_guest(owner, has)
        try:
            await self.leases.limit(owner.lease, before, limited)
        except ForkdError:
            if has != had:
                await _limit_guest(owner, had)
            raise
        if had is not None and (has is None or has > had):
            await _limit_guest(owner, has)

    @contextlib.contextmanager
    def _promised(self, owner: SandboxOwner, limited: Sandbox) -> Generator[None, None, None]:
        """Count a sandbox as what it is to have, if its tenant may have so much more."""
        snapshot, tenant = self.catalog.shelf.find(limited.tag), limited.owner.tenant
        had, has = amounts_of(owner.sandbox, snapshot), amounts_of(limited, snapshot)
        more = Amounts(memory_mib=max(0, has.memory_mib - had.memory_mib))
        with self.ledger.reserve(tenant, more):
            yield
            self.ledger.count(owner.lease.id, tenant, has)

    def _own(self, sandbox: Sandbox, lease: Lease) -> None:
        self._run(SandboxOwner(sandbox, lease, self._owner_tools))

    def _run(self, owner: SandboxOwner) -> SandboxOwner:
        self.roster.add(owner)
        if owner.sandbox.state is not SandboxState.EXITED:
            self._count(owner)
        self.tasks.run(TaskKind.OWNER, owner.run(), owner.sandbox.id, vital=True)
        return owner

    def _count(self, owner: SandboxOwner) -> None:
        """Count what a sandbox may use, and the seed that it has in common with its siblings."""
        lease, tenant = owner.lease, owner.sandbox.owner.tenant
        amounts = amounts_of(owner.sandbox, self.catalog.shelf.find(owner.sandbox.tag))
        self.ledger.count(lease.id, tenant, amounts)
        if lease.seed is not None:
            held = Amounts(memory_mib=amounts.memory_mib)
            self.ledger.share(seed_key(lease.seed), lease.id, tenant, held)

    def _release(self, owner: SandboxOwner) -> None:
        lease = owner.lease
        self.ledger.release(lease.id)
        if lease.seed is not None:
            self.ledger.let_go(seed_key(lease.seed), lease.id)

    def _note_gone(self, owner: SandboxOwner) -> None:
        self._release(owner)
        self.roster.remove(owner)

    def _note_exit(self, owner: SandboxOwner) -> None:
        self._release(owner)
        oldest = self.roster.note_exit(owner)
        if oldest is not None:
            self.tasks.run(TaskKind.DELETE, self.delete_all([oldest]), f"{oldest}, long exited")

    async def _delete_quietly(self, owner: SandboxOwner) -> None:
        try:
            await owner.delete()
        except ForkdError as error:
            about = {"sandbox": owner.sandbox.id, "error": str(error)}
            log.warning("sandbox not deleted", extra=about)


def _not_named(name: str) -> NotFound:
    return NotFound(f"no sandbox is named {name}", sandbox=name)


async def _limit_guest(owner: SandboxOwner, memory_bytes: int | None) -> None:
    """Have a guest keep a memory limit; if it cannot, only its cgroup does."""
    try:
        await owner.guest.limit(memory_bytes)
    except ForkdError as error:
        about = {"sandbox": owner.sandbox.id, "error": str(error)}
        log.warning("guest not limited", extra=about)
