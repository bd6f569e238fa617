"""How far trees of sandboxes may grow, and what changes in them meanwhile.

Budgets are those of a tree, checked before anything is made; children on their way count.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from forkd.errors import Conflict
from forkd.host import proc
from forkd.model.tree import count_live
from forkd.service import seeds

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.model.tree import TreeBudgets
    from forkd.service.sandboxes.roster import Roster

_MIB = 1 << 20


class Growth:
    """Which trees grow now, and in which somebody is promoted: never both in one."""

    def __init__(self, budgets: TreeBudgets, roster: Roster) -> None:
        self.budgets = budgets
        self._roster = roster
        self._growing: Counter[SandboxId] = Counter()
        self._promoting: set[SandboxId] = set()

    @contextlib.asynccontextmanager
    async def reserve(self, source: Sandbox, count: int) -> AsyncGenerator[None, None]:
        """Reserve room for `count` more sandboxes in a tree within the block.

        Raises:
            BudgetError: It has none.
            Conflict: Somebody is promoted in it.
        """
        root = source.root
        self._check_no_promotion(root)
        live = count_live(root, self._roster.all()) + self._growing[root]
        self.budgets.check_growth(source, count, live)
        self._growing[root] += count
        try:
            family = [each for each in self._roster.alive() if each.root == root]
            limit_bytes = self.budgets.private_mib_max * _MIB
            private_bytes = await asyncio.to_thread(_private_bytes, family, limit_bytes)
            self.budgets.check_private(source, private_bytes)
            yield
        finally:
            self._growing[root] -= count
            if self._growing[root] == 0:
                del self._growing[root]

    @contextlib.contextmanager
    def promoting(self, root: SandboxId) -> Generator[None, None, None]:
        """Let nobody branch a tree, or be promoted in it, within the block.

        Raises:
            Conflict: Somebody does.
        """
        self._check_no_promotion(root)
        if self._growing[root]:
            raise Conflict(f"the tree of {root} is being branched", root=root)
        self._promoting.add(root)
        try:
            yield
        finally:
            self._promoting.remove(root)

    def _check_no_promotion(self, root: SandboxId) -> None:
        if root in self._promoting:
            raise Conflict(f"a promotion is under way in the tree of {root}", root=root)


def _private_bytes(sandboxes: Iterable[Sandbox], limit_bytes: int) -> int:
    """Return the private memory of machines and their seeds; an upper bound, if below the limit."""
    machines = [each.pid for each in sandboxes if each.pid is not None]
    pids = [*machines, *seeds.retired_for(machines)]
    at_most = sum(proc.anonymous_bytes(pid) for pid in pids)
    if at_most < limit_bytes:
        return at_most
    return sum(proc.private_bytes(pid) or 0 for pid in pids)
