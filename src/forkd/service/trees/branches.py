"""Branch a running sandbox: into siblings, into a durable snapshot, or into both of one instant."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.model.caller import Owner, Scope
from forkd.model.event import EventKind
from forkd.model.sandbox import BranchOptions, BranchResult, check_fork_count
from forkd.model.tenant import Amounts
from forkd.service import seeds
from forkd.service.ledger import amounts_of
from forkd.service.sandboxes.forking import Origin
from forkd.service.sandboxes.lifecycle import LifeEvent, check
from forkd.service.supervision import TaskKind
from forkd.service.trees.stalls import noticed
from forkd.service.use_case import use_case
from forkd.telemetry import names

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from forkd.model.caller import Caller
    from forkd.model.ids import SandboxId, Tag
    from forkd.model.sandbox import Sandbox
    from forkd.model.snapshot import BuiltLink, Snapshot
    from forkd.service.sandboxes.component import Sandboxes
    from forkd.service.sandboxes.owner import SandboxOwner
    from forkd.service.seeds import Seed
    from forkd.service.settings import HostSettings
    from forkd.service.snapshots.writing import LinkWriter
    from forkd.service.supervision import Supervisor
    from forkd.service.trees.growth import Growth
    from forkd.telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class _Plan:
    """A branch that was checked.

    Attributes:
        owner: Whose the siblings and the snapshot will be.
        count: How many siblings.
        options: How they are made.
        tag: Name of the snapshot; None for none.
        wait: Whether to wait until that is written.
        built: What the snapshot is, if a build makes it.
    """

    owner: Owner
    count: int
    options: BranchOptions
    tag: Tag | None
    wait: bool
    built: BuiltLink | None = None


@dataclass(frozen=True, slots=True)
class Branches:
    """Branches sandboxes; `forkd.service.api.Branches` documents what a caller may ask.

    Attributes:
        settings: Where seeds live.
        tasks: Runs branches.
        sandboxes: What is branched.
        growth: How far trees may grow.
        writer: Writes snapshots.
    """

    telemetry: Telemetry
    settings: HostSettings
    tasks: Supervisor
    sandboxes: Sandboxes
    growth: Growth
    writer: LinkWriter

    @use_case("branch", Scope.RUN)
    async def branch(  # noqa: PLR0913 - what a caller may ask
        self,
        caller: Caller,
        sandbox: SandboxId,
        count: int,
        options: BranchOptions,
        *,
        tag: Tag | None = None,
        wait: bool = True,
    ) -> BranchResult:
        """Branch a running sandbox."""
        if tag is not None:
            caller.require(Scope.SNAPSHOTS)
        if tag is None or count != 0:
            check_fork_count(count)
        source = self.sandboxes.roster.get(caller, sandbox)
        check(source.sandbox, LifeEvent.BRANCH)
        return await self.tasks.finish(
            TaskKind.BRANCH,
            self._branch(source, _Plan(_heir(caller, source), count, options, tag, wait)),
            f"{count} of {sandbox}",
            undo=lambda result: self.sandboxes.delete_all(s.id for s in result.fork.sandboxes),
        )

    async def snapshot(
        self, caller: Caller, sandbox: SandboxId, tag: Tag, *, wait: bool
    ) -> Snapshot:
        """Take a durable snapshot of a running sandbox, as a link over what it goes back to.

        It is written to its end even if the caller goes away.

        Raises:
            ForkdError: As `branch`.
        """
        result = await self.branch(caller, sandbox, 0, BranchOptions(), tag=tag, wait=wait)
        if result.snapshot is None:
            raise InvalidRequest("a branch without siblings needs a tag", field="tag")
        return result.snapshot

    async def write_built(
        self, caller: Caller, sandbox: SandboxId, tag: Tag, built: BuiltLink
    ) -> Snapshot:
        """Take a durable snapshot that is the result of a step of a build.

        Raises:
            ForkdError: As `branch`.
        """
        source = self.sandboxes.roster.get(caller, sandbox)
        check(source.sandbox, LifeEvent.BRANCH)
        plan = _Plan(_heir(caller, source), 0, BranchOptions(), tag, wait=True, built=built)
        work = self._branch(source, plan)
        result = await self.tasks.run(TaskKind.BRANCH, work, f"a step of {sandbox}")
        assert result.snapshot is not None  # noqa: S101 - there is a tag
        return result.snapshot

    async def _branch(self, source: SandboxOwner, plan: _Plan) -> BranchResult:
        sandbox, options = source.sandbox, plan.options.of(source.sandbox)
        snapshot = self.sandboxes.catalog.get(sandbox.tag)
        origin = Origin(snapshot, (*sandbox.ancestors, sandbox.id), source.lease)
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            claim = None
            if plan.tag is not None:
                about = (plan.tag, sandbox, plan.owner)
                claiming = self.writer.claim(*about, wait=plan.wait, built=plan.built)
                claim = await enter(claiming)
            await enter(self.growth.reserve(sandbox, plan.count))
            await self._prepare_siblings(source, plan.count)
            batch = await enter(
                self.sandboxes.forks.prepare(plan.owner, origin, plan.count, options)
            )
            async with noticed(source.guest) as stall, self._seed_of(source) as seed:
                branched_at = datetime.now(UTC)
                if claim is not None:
                    claim.write(seed)
                if plan.count > 0:
                    if batch.users is not None and not seed.makes_users:
                        await batch.share(source.lease)
                    async with await seed.connect() as zygote:
                        await batch.fork(zygote)
            if claim is not None and plan.wait:
                await claim.written()
            fork = await batch.keep(branched_at=branched_at, seed=seed.process.pid)
            if claim is not None:
                held = Amounts(memory_mib=amounts_of(sandbox, snapshot).memory_mib)
                claim.count(self.sandboxes.ledger, seed, plan.owner.tenant, held)
        self._report(sandbox, plan, seed.pause_ms)
        written = None if claim is None else claim.snapshot
        result = BranchResult(fork, seed.pause_ms, branched_at, snapshot=written)
        return replace(result, stall_ms=stall.longest_ms, stall_unknown=stall.unknown)

    async def _prepare_siblings(self, source: SandboxOwner, count: int) -> None:
        async with source.exclusive("branch") as sandbox:
            check(sandbox, LifeEvent.BRANCH)
            if count > 0 and sandbox.pid is not None:
                vmm, lease = self.settings.vmm, source.lease
                await self.sandboxes.leases.prepare_siblings(vmm, lease, sandbox.pid, count)

    def _report(self, sandbox: Sandbox, plan: _Plan, pause_ms: float) -> None:
        about: dict[str, str | float | None] = {
            "siblings": plan.count,
            "tag": plan.tag,
            "pause_ms": pause_ms,
        }
        kind = EventKind.SANDBOX_BRANCHED
        self.sandboxes.journal.note(kind, sandbox.id, sandbox.owner, **about)
        self.telemetry.observe(names.PAUSE_SECONDS, pause_ms / 1_000)

    @contextlib.asynccontextmanager
    async def _seed_of(self, source: SandboxOwner) -> AsyncGenerator[Seed, None]:
        """Have a running sandbox leave a seed of itself, which is retired after the block.

        Raises:
            NotFound: The sandbox was deleted.
            Conflict: It does not run.
            EngineError: The machine ended.
        """
        async with source.exclusive("branch") as sandbox:
            check(sandbox, LifeEvent.BRANCH)
            await self.sandboxes.leases.allow_seeds(source.lease, sandbox, 1)
            cgroup = seeds.cgroup_of(sandbox)
            seed = await seeds.take(self.settings, source.control, cgroup, source.lease.uid)
        async with seed:
            yield seed


def _heir(caller: Caller, source: SandboxOwner) -> Owner:
    """Return whose things are that are made of a sandbox: its tenant's, whoever asks."""
    return Owner(source.sandbox.owner.tenant, caller.principal)
