"""What is done to a running sandbox as a whole: branch it, reset it, draw its tree.

Budgets are those of a tree, checked before anything is made; children on their way count.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.engine.control import Control
from forkd.errors import Conflict, NotFound
from forkd.host import proc
from forkd.limits import FORK_DEADLINE_S_MAX
from forkd.model.checks import in_range
from forkd.model.sandbox import BranchResult, SandboxState
from forkd.model.tree import count_live, grow
from forkd.service import promotion, seeds
from forkd.service.lifecycle import LifeEvent, next_state
from forkd.service.sandboxes import Origin, identity_of
from forkd.service.stalls import Stall, noticed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import BranchOptions, Promotion, Sandbox
    from forkd.model.tree import TreeBudgets, TreeNode
    from forkd.service.sandboxes import Sandboxes
    from forkd.service.seeds import Seed
    from forkd.service.settings import HostSettings

_MIB = 1 << 20


class Trees:
    """The trees of one host's sandboxes."""

    def __init__(self, settings: HostSettings, sandboxes: Sandboxes) -> None:
        self._settings = settings
        self._sandboxes = sandboxes
        self._growing: Counter[SandboxId] = Counter()
        self._promoting: set[SandboxId] = set()

    @property
    def budgets(self) -> TreeBudgets:
        """How far a tree may grow."""
        return self._settings.budgets

    async def branch(
        self,
        source: SandboxId,
        count: int,
        options: BranchOptions,
        *,
        on_seed: Callable[[Seed], Awaitable[None]] | None = None,
    ) -> BranchResult:
        """Branch a running sandbox into `count` siblings; see `forkd.service.api`.

        Args:
            source: The sandbox.
            count: How many siblings.
            options: How they are made.
            on_seed: Called with the seed before siblings are forked of it; may hold it.

        Raises:
            NotFound: There is no such sandbox.
            Conflict: It does not run.
            BudgetError: Its tree may not grow so much.
            CapacityError: The host has no room for so many.
            EngineError: The machine ended, or `all_or_nothing` was asked for and one failed.
        """
        sandbox = self._sandboxes.owner(source).sandbox
        next_state(sandbox.state, LifeEvent.BRANCH)
        pause_ms, stall = 0.0, Stall()

        @contextlib.asynccontextmanager
        async def connect() -> AsyncGenerator[Control, None]:
            nonlocal pause_ms, stall
            async with contextlib.AsyncExitStack() as stack:
                guest = self._sandboxes.owner(source).guest
                stall = await stack.enter_async_context(noticed(guest))
                seed = await stack.enter_async_context(self.seed(source))
                origin.branched_at, pause_ms = datetime.now(UTC), seed.pause_ms
                if on_seed is not None:
                    await on_seed(seed)
                yield await stack.enter_async_context(await seed.connect())

        origin = Origin(sandbox.tag, connect, (*sandbox.ancestors, sandbox.id))
        async with self._growth(sandbox, count):
            result = await self._sandboxes.fork(origin, count, options.of(sandbox))
        branched_at = origin.branched_at or sandbox.created_at
        return BranchResult(result, pause_ms, branched_at, stall.longest_ms, stall.unknown)

    @contextlib.asynccontextmanager
    async def seed(self, source: SandboxId) -> AsyncGenerator[Seed, None]:
        """Have a running sandbox leave a seed of itself, which is retired after the block.

        Raises:
            NotFound: There is no such sandbox.
            Conflict: It does not run.
            EngineError: The machine ended.
        """
        owner = self._sandboxes.owner(source)
        async with owner.held() as sandbox:
            next_state(sandbox.state, LifeEvent.BRANCH)
            cgroup = seeds.cgroup_of(sandbox)
            seed = await seeds.take(self._settings, owner.control, cgroup)
        async with seed:
            yield seed

    async def reset(self, sandbox: SandboxId, deadline_s: float) -> float:
        """Take a sandbox back to its fork point, in place; return how long, in milliseconds.

        Raises:
            NotFound: There is no such sandbox.
            Conflict: It does not run, or the seed of its branch was ended; it goes on.
            GuestError: Its agent refused to become somebody again; the machine has ended.
            EngineError: The machine ended.
        """
        in_range("deadline_s", deadline_s, 0.1, FORK_DEADLINE_S_MAX)
        owner = self._sandboxes.owner(sandbox)
        async with owner.held() as found:
            next_state(found.state, LifeEvent.RESET)
            owner.guest.close()
            identity = identity_of(found, owner.slot)
            async with await Control.connect(owner.control) as control:
                return await control.reset(identity, deadline_s=deadline_s)

    async def promote(self, child: SandboxId) -> Promotion:
        """Let a sandbox take its parent's place; see `forkd.service.promotion`.

        Raises:
            Conflict: Its tree is being branched, or somebody else is promoted in it; also as
                `promotion.promote`.
        """
        root = self._sandboxes.owner(child).sandbox.root
        self._check_no_promotion(root)
        if self._growing[root]:
            raise Conflict(f"the tree of {root} is being branched", root=root)
        self._promoting.add(root)
        try:
            return await promotion.promote(self._sandboxes, child)
        finally:
            self._promoting.remove(root)

    async def finish_promotion(self, sandbox: SandboxId) -> None:
        """Finish what an earlier daemon began; a failure is logged."""
        await promotion.finish_quietly(self._sandboxes, self._sandboxes.owner(sandbox))

    def _check_no_promotion(self, root: SandboxId) -> None:
        if root in self._promoting:
            raise Conflict(f"somebody is being promoted in the tree of {root}", root=root)

    async def draw(self, member: SandboxId | None = None) -> tuple[TreeNode, ...]:
        """Return every tree, or the one that a sandbox is, or was, in.

        Raises:
            NotFound: There is no such sandbox, and nobody that was branched from it.
        """
        chosen = self._sandboxes.list_all()
        if member is not None:
            roots = [each.root for each in chosen if member in (each.id, *each.ancestors)]
            if not roots:
                raise NotFound(f"no sandbox {member}", sandbox=member)
            chosen = tuple(each for each in chosen if each.root == roots[0])
        held = await asyncio.to_thread(_private_of, chosen)
        return grow(chosen, held)

    @contextlib.asynccontextmanager
    async def _growth(self, source: Sandbox, count: int) -> AsyncGenerator[None, None]:
        """Hold the place of `count` more sandboxes in a tree, if it has room for them."""
        root = source.root
        self._check_no_promotion(root)
        live = count_live(root, self._sandboxes.list_all()) + self._growing[root]
        self.budgets.check_growth(source, count, live)
        self._growing[root] += count
        try:
            family = [each for each in self._sandboxes.alive() if each.root == root]
            limit_bytes = self.budgets.private_mib_max * _MIB
            held_bytes = await asyncio.to_thread(_held_bytes, family, limit_bytes)
            self.budgets.check_private(source, held_bytes)
            yield
        finally:
            self._growing[root] -= count
            if self._growing[root] == 0:
                del self._growing[root]


def _private_of(sandboxes: Iterable[Sandbox]) -> dict[SandboxId, int | None]:
    running = (each for each in sandboxes if each.state is SandboxState.RUNNING)
    return {each.id: proc.private_bytes(each.pid) for each in running if each.pid is not None}


def _held_bytes(sandboxes: Iterable[Sandbox], limit_bytes: int) -> int:
    """Return what machines and their seeds share with nobody, or more that is below the limit."""
    machines = [each.pid for each in sandboxes if each.pid is not None]
    pids = [*machines, *seeds.held_for(machines)]
    at_most = sum(proc.anonymous_bytes(pid) for pid in pids)
    if at_most < limit_bytes:
        return at_most
    return sum(proc.private_bytes(pid) or 0 for pid in pids)
