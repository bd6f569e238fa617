"""Which sandboxes were branched from which, and what each has of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import NotFound
from forkd.host import proc
from forkd.model.caller import Scope
from forkd.model.tree import grow
from forkd.service.use_case import use_case

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forkd.model.caller import Caller
    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.model.tree import TreeBudgets, TreeNode
    from forkd.service.sandboxes.roster import Roster
    from forkd.service.trees.growth import Growth
    from forkd.service.workers import Workers
    from forkd.telemetry.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Trees:
    """Draws trees; `forkd.service.api_trees.Trees` documents what a caller may ask."""

    telemetry: Telemetry
    roster: Roster
    growth: Growth
    workers: Workers

    @use_case("draw_trees", Scope.READ)
    async def draw(self, caller: Caller, member: SandboxId | None = None) -> tuple[TreeNode, ...]:
        """Return every tree, or the one that a sandbox is, or was, in."""
        chosen = self.roster.visible(caller)
        if member is not None:
            roots = [each.root for each in chosen if member in (each.id, *each.ancestors)]
            if not roots:
                raise NotFound(f"no sandbox {member}", sandbox=member)
            chosen = tuple(each for each in chosen if each.root == roots[0])
        private = await self.workers.run(caller, lambda: _private_of(chosen))
        return grow(chosen, private)

    @use_case("tree_budgets", Scope.READ)
    async def budgets(self, caller: Caller) -> TreeBudgets:
        """Return how far a tree may grow."""
        return self.growth.budgets


def _private_of(sandboxes: Iterable[Sandbox]) -> dict[SandboxId, int | None]:
    running = (each for each in sandboxes if each.state.has_machine)
    return {each.id: proc.private_bytes(each.pid) for each in running if each.pid is not None}
