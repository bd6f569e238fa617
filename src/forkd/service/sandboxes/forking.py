"""Fork sandboxes: from their rows to their owners, or nothing.

    async with forks.prepare(owner, origin, count, options) as batch:
        await batch.fork(zygote)        # or a seed: whatever children are forked from
        result = await batch.keep()

Rows are written before anything is made, and leases acquired before the zygote is asked.  A batch
that is not kept is undone at the end of the block, whatever it had come to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from forkd.engine.configs import ChildConfig
from forkd.engine.control import Control
from forkd.engine.guest import Guest
from forkd.engine.process import CONFIG_OPTION, CONTROL_SOCKET, VSOCK_SOCKET
from forkd.engine.replies import ChildFailed, ChildReady
from forkd.errors import CapacityError, EngineError, ForkdError
from forkd.host import files, proc
from forkd.host.gates import Gates
from forkd.limits import SANDBOXES_MAX
from forkd.model.caller import touch
from forkd.model.event import EventKind
from forkd.model.ids import new_sandbox_id
from forkd.model.sandbox import (
    ForkFailure,
    ForkResult,
    Sandbox,
    SandboxState,
    SpawnTimes,
    end_of,
)
from forkd.model.tenant import Amounts
from forkd.service.allowance import allow, limits_of
from forkd.service.ledger import amounts_of
from forkd.service.sandboxes.identity import identity_of
from forkd.service.sandboxes.lifecycle import LifeEvent, next_state
from forkd.service.sandboxes.owner import row_of, stop_machine
from forkd.service.supervision import to_end
from forkd.telemetry import names, tracing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from forkd.engine.replies import SpawnStages
    from forkd.model.caller import Owner
    from forkd.model.ids import SandboxId, Tag
    from forkd.model.sandbox import ForkOptions
    from forkd.model.snapshot import Snapshot
    from forkd.service.admission import Admission
    from forkd.service.introduction import Introduction
    from forkd.service.jail import Part
    from forkd.service.journal import Journal
    from forkd.service.leases import Lease, Leases
    from forkd.service.ledger import Ledger, Reservation
    from forkd.service.records import Records
    from forkd.service.sandboxes.roster import Roster
    from forkd.service.settings import HostSettings
    from forkd.telemetry.telemetry import Telemetry

REQUEST_CHILDREN_MAX = 1_000
"""Most children in one request to a zygote, so that the request fits into a frame."""

USERS_NAME = "users"
"""What a seed is told that the user namespace of its children is called."""

INTRODUCED_AT_ONCE = 32
"""How many guests are told of their secrets at the same time."""

IDENTIFIED_AT_ONCE = 32
"""How many siblings are asked at the same time which process they are."""

UNDO_AT_ONCE = 32
"""How many machines of a failed fork are ended at the same time."""

_MIB = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """What sandboxes are forked from.

    Attributes:
        snapshot: What all of it goes back to.
        ancestors: Those of the children, their parent last; none for forks of the snapshot.
        source: What their parent holds of the host; None for forks of the snapshot.
        part: The users of the snapshot's zygote; None if it is not jailed, and for siblings.
    """

    snapshot: Snapshot
    ancestors: tuple[SandboxId, ...] = ()
    source: Lease | None = None
    part: Part | None = None

    @property
    def tag(self) -> Tag:
        """The snapshot's tag."""
        return self.snapshot.tag


@dataclass(slots=True)
class _Child:
    """One child on its way: its lease, and what became of it."""

    sandbox: Sandbox
    lease: Lease
    failure: ForkFailure | None = None

    def fail(self, stage: str, code: str, message: str, attempts: int = 1) -> None:
        self.failure = ForkFailure(self.sandbox.id, stage, code, message, attempts)


@dataclass
class Forks:
    """Forks sandboxes.

    Attributes:
        telemetry: Where it is noted how long they took.
        admission: Whether the host has room for them.
        settings: Where their disks lie, and what these may take.
        records: Where they are written down.
        leases: What they get of the host.
        ledger: What their tenants may have.
        journal: Where it is noted what becomes of them.
        roster: Which there are.
        introduction: What guests are told of their secrets.
        adopt: Called with each that is ready, and its lease: gives it an owner.
    """

    telemetry: Telemetry
    admission: Admission
    settings: HostSettings
    records: Records
    leases: Leases
    ledger: Ledger
    journal: Journal
    roster: Roster
    introduction: Introduction
    adopt: Callable[[Sandbox, Lease], None]
    _forking: int = 0

    @contextlib.asynccontextmanager
    async def prepare(
        self, owner: Owner, origin: Origin, count: int, options: ForkOptions
    ) -> AsyncGenerator[Batch, None]:
        """Give `count` children all that they need on the host; undone unless it is kept.

        Raises:
            CapacityError: The host has no room for so many.
            HostError: It cannot limit I/O, and they are to be limited.
            StoreError: They could not be written down.
            QuotaExceeded: Their tenant may not have so many.
        """
        if len(self.roster) + self._forking + count > SANDBOXES_MAX:
            raise CapacityError(f"a host has at most {SANDBOXES_MAX} sandboxes", asked=count)
        ids = [new_sandbox_id() for _ in range(count)]
        if options.disk_limit_mib is None:
            options = replace(options, disk_limit_mib=self.settings.disks.limit_mib)
        if self.settings.cgroups:
            options = allow(options, origin.snapshot)
        each = amounts_of(options, origin.snapshot)
        asked = replace(each, forks_per_minute=1) * count
        if origin.source is not None:  # the seed has as much memory as any of them
            asked += Amounts(memory_mib=each.memory_mib)
        self.admission.check(asked.memory_mib)
        await self.leases.check(limits_of(options))
        with self.ledger.reserve(owner.tenant, asked) as reservation:
            leases = self.leases.reserve(
                ids,
                options.network,
                held=options.hold_egress,
                bandwidth_mbit=options.bandwidth_limit_mbit,
                origin=origin.source or origin.part,
            )
            now = datetime.now(UTC)
            expires_at = end_of(options.ttl_s, now, self.settings.sandbox_ttl_s)
            # Each a microsecond after the one before, so that lists keep their order.
            made_at = [now + number * timedelta.resolution for number in range(count)]
            children = [
                _Child(_new_sandbox(lease, owner, origin, options, at, expires_at), lease)
                for lease, at in zip(leases, made_at, strict=True)
            ]
            for child in children:
                child.lease.use = child.sandbox.use
                child.lease.tenant = owner.tenant
            batch = Batch(children, origin, options, self, reservation)
            self._forking += count
            try:
                if origin.source is not None:
                    batch.users = origin.source.open_siblings()
                with tracing.span("fork prepare", children=count):
                    await batch.acquire()
                yield batch
            finally:
                self._forking -= count
                batch.close_users()
                if not batch.kept:
                    await to_end(batch.undo())
                elif options.network is not None:
                    self.leases.replenish()


class Batch:
    """Children that are forked together.

    Attributes:
        kept: Whether `keep` has returned.
        users: A descriptor of the user namespace in which the children become their users; None if
            whoever forks them can have them be others, or they share their source's.
    """

    def __init__(
        self,
        children: list[_Child],
        origin: Origin,
        options: ForkOptions,
        forks: Forks,
        reservation: Reservation,
    ) -> None:
        self.kept = False
        self.users: int | None = None
        self._snapshot, self._source = origin.snapshot, origin.source
        self._reservation = reservation
        self._children = children
        self._options = options
        self._forks = forks
        self._wall_ms = 0.0

    async def acquire(self) -> None:
        """Write the children down, then make what they need; those that get it not have failed.

        Raises:
            StoreError: They could not be written down.
        """
        await self._forks.records.put(
            row_of(child.sandbox, child.lease) for child in self._children
        )
        leases = [child.lease for child in self._children]
        failed = await self._forks.leases.acquire(leases, limits_of(self._options))
        for child in self._children:
            if (error := failed.get(child.lease.id)) is not None:
                child.fail("prepare", error.code, str(error))

    def close_users(self) -> None:
        """Let go of the children's user namespace; idempotent."""
        users, self.users = self.users, None
        if users is not None:
            files.close(users)

    async def share(self, source: Lease) -> None:
        """Have the children be their source's user after all: its VMM can have them be no others.

        Raises:
            HostError: The kernel refused.
        """
        self.close_users()
        for child in self._children:
            if child.failure is None:
                await asyncio.to_thread(self._forks.leases.share, child.lease, source)

    async def fork(self, zygote: Control) -> None:
        """Have the children forked, and note what became of each.

        Raises:
            EngineError: The zygote ended, or did not finish.
        """
        waiting = {str(child.sandbox.id): child for child in self._children if not child.failure}
        settings, snapshot = self._forks.settings, self._snapshot
        configs = [_config(child, settings, snapshot) for child in waiting.values()]

        def note(outcome: ChildReady | ChildFailed) -> None:
            child = waiting.pop(outcome.id, None)
            if child is not None:
                _note(child, outcome)

        rootless, leases = settings.rootless_jail, self._forks.leases
        if not rootless:
            leases.close_taps(each.lease for each in self._children if each.lease.uid is None)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for start in range(0, len(configs), REQUEST_CHILDREN_MAX):
            batch = configs[start : start + REQUEST_CHILDREN_MAX]
            users = self.users if start == 0 else None  # it stays where it went
            jailed = [each for each in batch if each.uid is not None or rootless]
            with self._gates(rootless=rootless) as gates:
                await _hand(zygote, jailed, users, leases, gates)
                async with contextlib.nullcontext() if gates is None else gates.served():
                    await zygote.fork(
                        batch,
                        deadline_s=self._options.deadline_s,
                        on_outcome=note,
                        users=None if users is None else USERS_NAME,
                    )
        for child in waiting.values():
            child.fail("zygote", "engine", "the zygote never reported this child")
        await self._identify()
        if self._options.secrets and self._source is None:  # who have what their source was told
            await self._introduce()
        self._wall_ms = (loop.time() - began_s) * 1_000

    async def _identify(self) -> None:
        """Make sure which process each child is; who cannot be told has failed.

        What a zygote names is believed if it is one of ours.  A seed's is not: it may name another
        sandbox's machine, being as little to be trusted as the machine that it was.
        """
        run_dir = self._forks.settings.run_dir
        at_once = asyncio.Semaphore(IDENTIFIED_AT_ONCE)

        async def identify(child: _Child) -> None:
            async with at_once:
                await _identify(child)

        def is_believed(pid: int) -> bool:
            return self._source is None and proc.has_option_below(pid, CONFIG_OPTION, run_dir)

        named = [(child, child.sandbox.pid) for child in self._children]
        doubtful = [each for each, pid in named if pid is not None and not is_believed(pid)]
        await asyncio.gather(*map(identify, doubtful))

    def _gates(self, *, rootless: bool) -> Gates | contextlib.nullcontext[None]:
        """Return gates for siblings, whose seed may not have them born in their cgroups."""
        source = self._source
        if source is None:
            return contextlib.nullcontext()
        leases = (source, *(child.lease for child in self._children))
        users = None if rootless else {each.uid for each in leases if each.uid is not None}
        return Gates(users)

    async def _introduce(self) -> None:
        """Tell guests of the CA and the placeholders of their sandbox; who cannot be has failed."""
        at_once = asyncio.Semaphore(INTRODUCED_AT_ONCE)

        async def introduce(child: _Child) -> None:
            use = child.sandbox.use
            if use is None or child.failure is not None:
                return
            try:
                async with at_once:
                    with contextlib.closing(Guest(child.lease.directory / VSOCK_SOCKET)) as guest:
                        await self._forks.introduction.give(guest, use)
            except ForkdError as error:
                child.fail("secrets", error.code, str(error))

        await asyncio.gather(*map(introduce, self._children))
        failed = [each for each in self._children if each.failure is not None]
        for child in failed:
            if child.sandbox.pid is not None:
                await self._stop(child, at_once)

    async def keep(
        self, *, branched_at: datetime | None = None, seed: int | None = None
    ) -> ForkResult:
        """Give each child that is ready an owner, and release what the others had.

        Args:
            branched_at: At which instant of their parent's life they were branched.
            seed: The process that they are reset to, if that is a seed's.

        Raises:
            EngineError: One failed, and `all_or_nothing` was asked for.
            CapacityError: Likewise; the host may have room later.
            StoreError: They could not be written down.
        """
        failures = tuple(child.failure for child in self._children if child.failure is not None)
        if failures and self._options.all_or_nothing:
            for child in self._children:
                if child.failure is not None:
                    self._report(child)
            raise _all_or_nothing_error(failures, len(self._children))
        ready = [child for child in self._children if child.failure is None]
        if branched_at is not None:
            for child in ready:
                child.sandbox = replace(child.sandbox, branched_at=branched_at)
        if not self._options.die_with_daemon:  # the next daemon ends what is still starting
            await self._forks.records.put(row_of(child.sandbox, child.lease) for child in ready)
        self.kept = True
        self._reservation.settle()
        for child in ready:
            child.lease.seed = seed
            self._forks.adopt(child.sandbox, child.lease)
        for child in self._children:
            self._report(child)
        await self._release([child for child in self._children if child.failure is not None])
        return ForkResult(tuple(child.sandbox for child in ready), failures, self._wall_ms)

    def _report(self, child: _Child) -> None:
        sandbox, spawn = child.sandbox, child.sandbox.spawn
        about: dict[str, str | None] = {"tag": sandbox.tag, "parent": sandbox.parent}
        kind, journal = EventKind.SANDBOX_READY, self._forks.journal
        telemetry = self._forks.telemetry
        telemetry.count(names.CHILDREN, "ready" if child.failure is None else "failed")
        made = sandbox if child.failure is None else child.failure
        if made.attempts > 1:
            telemetry.count(names.CHILDREN_AGAIN)
        touch(sandbox.id)
        if child.failure is not None:
            kind = EventKind.SANDBOX_FAILED
            about |= {"stage": child.failure.stage, "error": child.failure.message}
        elif spawn is not None:
            telemetry.observe(names.FIRST_ANSWER_SECONDS, spawn.total_ms / 1_000)
        journal.note(kind, sandbox.id, sandbox.owner, **about)

    async def undo(self) -> None:
        """End all children and take back what they had."""
        at_once = asyncio.Semaphore(UNDO_AT_ONCE)
        await asyncio.gather(*(self._stop(child, at_once) for child in self._children))
        await self._release(self._children)

    async def _stop(self, child: _Child, at_once: asyncio.Semaphore) -> None:
        control = child.lease.directory / CONTROL_SOCKET
        try:
            async with at_once:
                await stop_machine(control, child.sandbox.pid)
        except ForkdError as error:
            log.warning("child not ended", extra=_about(child, error))

    async def _release(self, children: Sequence[_Child]) -> None:
        """Take back what children that do not live had, and forget them.

        The row of one that cannot be cleaned stays, and with it the next start's duty to try.
        """
        if not children:
            return
        failed = await self._forks.leases.release([child.lease for child in children])
        for child in children:
            if (error := failed.get(child.lease.id)) is not None:
                log.warning("child not cleaned", extra=_about(child, error))
        released = [child.sandbox.id for child in children if child.lease.id not in failed]
        try:
            await self._forks.records.remove(released)
        except ForkdError as error:
            log.warning("children not forgotten", extra={"error": str(error)})


def _new_sandbox(  # noqa: PLR0913, PLR0917 - what a sandbox is made of
    lease: Lease,
    owner: Owner,
    origin: Origin,
    options: ForkOptions,
    now: datetime,
    expires_at: datetime | None,
) -> Sandbox:
    return Sandbox(
        id=lease.id,
        tag=origin.tag,
        state=SandboxState.STARTING,
        created_at=now,
        hostname=lease.id,
        address=None if lease.slot is None else lease.slot.guest,
        memory_limit_mib=options.memory_limit_mib,
        disk_limit_mib=options.disk_limit_mib,
        ancestors=origin.ancestors,
        expires_at=expires_at,
        idle_ttl_s=options.idle_ttl_s,
        cpu_limit=options.cpu_limit,
        cpu_weight=options.cpu_weight,
        io_limit_mib_s=options.io_limit_mib_s,
        io_limit_ops=options.io_limit_ops,
        pids_limit=options.pids_limit,
        bandwidth_limit_mbit=options.bandwidth_limit_mbit,
        owner=owner,
        network=lease.policy,
        egress_held=lease.held,
        secrets=options.secrets,
        name=options.name,
        labels=options.labels,
        env=options.env,
    )


def _config(child: _Child, settings: HostSettings, snapshot: Snapshot) -> ChildConfig:
    limit_mib = child.sandbox.disk_limit_mib
    return ChildConfig(
        id=child.sandbox.id,
        directory=child.lease.directory,
        identity=identity_of(child.sandbox, child.lease.slot, snapshot),
        uid=child.lease.uid,
        cgroup=child.lease.cgroup,
        top_limit_bytes=None if limit_mib is None else limit_mib * _MIB,
        top_directory=settings.tops_dir,
        top_reserve_bytes=settings.disks.reserve_mib * _MIB,
    )


async def _hand(
    zygote: Control,
    children: Sequence[ChildConfig],
    users: int | None,
    leases: Leases,
    gates: Gates | None,
) -> None:
    """Give a zygote what its children cannot open, which are jailed.

    Args:
        zygote: It, or a seed.
        children: Those that it will be asked for.
        users: A user namespace that it is to enter.
        leases: Theirs.
        gates: Where they wait to be moved to their cgroups; None if it has them born there.

    Raises:
        HostError: One of their taps cannot be opened.
        ForkdError: The zygote did not take them.
    """
    with contextlib.ExitStack() as opened:

        def open_all() -> dict[str, int]:
            found = {} if users is None else {USERS_NAME: users}
            for child in children:
                if child.identity.network is not None:
                    tap = child.identity.network.tap
                    found[tap] = leases.open_tap(tap)
                    opened.callback(files.close, found[tap])
                if gates is not None and child.cgroup is not None:
                    name = str(child.cgroup)
                    found[name] = gates.add(child.cgroup)
                    opened.callback(files.close, found[name])
            return found

        await zygote.hand(await asyncio.to_thread(open_all))


def _note(child: _Child, outcome: ChildReady | ChildFailed) -> None:
    if isinstance(outcome, ChildFailed):
        child.fail(outcome.stage, outcome.code, outcome.message, outcome.attempts)
        return
    slot = child.lease.slot
    if slot is not None and not outcome.ipv6:  # the guest's kernel or agent has none
        slot = child.lease.slot = slot.only_v4()
    child.sandbox = replace(
        child.sandbox,
        state=next_state(child.sandbox.state, LifeEvent.READY),
        address_v6=slot.guest_v6 if slot is not None and slot.ipv6 else None,
        pid=outcome.pid,
        spawn=_times(outcome.ms),
        attempts=outcome.attempts,
    )


async def _identify(child: _Child) -> None:
    """Ask the kernel which process a child is, whatever its zygote has named."""
    try:
        async with await Control.connect(child.lease.directory / CONTROL_SOCKET) as control:
            child.sandbox = replace(child.sandbox, pid=control.peer_pid())
    except ForkdError as error:
        log.warning("child unknown", extra=_about(child, error))
        if isinstance(error, CapacityError):
            child.fail("zygote", error.code, str(error))
        else:
            named = child.sandbox.pid
            child.fail("zygote", "engine", f"the zygote named process {named}, not ours")
        child.sandbox = replace(child.sandbox, pid=None)


def _times(stages: SpawnStages) -> SpawnTimes:
    return SpawnTimes(
        clone_ms=stages.clone,
        build_ms=stages.build,
        resume_ms=stages.resume,
        agent_ms=stages.agent,
        total_ms=stages.total,
    )


def _all_or_nothing_error(failures: tuple[ForkFailure, ...], asked: int) -> ForkdError:
    first = failures[0]
    kind = CapacityError if first.code == CapacityError.code else EngineError
    return kind(
        f"{len(failures)} of {asked} children failed, the first at {first.stage}: {first.message}",
        stage=first.stage,
        control_code=first.code,
        failed=len(failures),
    )


def _about(child: _Child, error: ForkdError) -> dict[str, str]:
    return {"sandbox": child.sandbox.id, "error": str(error)}
