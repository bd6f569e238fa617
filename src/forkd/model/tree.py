"""Who was branched from whom, and how far that may go.  Pure.

A tree is a sandbox that was forked from a snapshot, its root, and whatever was branched
from it, however many branches away.  It outlives its root: a sandbox knows all of its
ancestors, so those that are gone keep their places as nodes without a sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd import limits
from forkd.errors import BudgetError
from forkd.model.checks import in_range
from forkd.model.sandbox import SandboxState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TreeBudgets:
    """How far one tree may grow, so that nobody forks the host away.

    Attributes:
        live_max: Most live descendants of its root.
        depth_max: Most branches between the root and any descendant.
        private_mib_max: Most private memory of its machines.

    Raises:
        InvalidRequest: One is less than 1.
    """

    live_max: int = limits.TREE_LIVE_DEFAULT
    depth_max: int = limits.TREE_DEPTH_DEFAULT
    private_mib_max: int = limits.TREE_PRIVATE_MIB_DEFAULT

    def __post_init__(self) -> None:
        for name in ("live_max", "depth_max", "private_mib_max"):
            in_range(f"tree {name}", getattr(self, name), 1, float("inf"))

    def check_growth(self, source: Sandbox, count: int, live: int) -> None:
        """Return if `count` siblings of `source` fit into its tree, which has `live` descendants.

        Raises:
            BudgetError: They do not.
        """
        depth = len(source.ancestors) + 1
        if depth > self.depth_max:
            raise BudgetError(
                f"{source.id} is {depth - 1} branches below its root, and a tree has at most "
                f"{self.depth_max}",
                budget="depth",
                root=source.root,
            )
        if live + count > self.live_max:
            raise BudgetError(
                f"the tree of {source.root} has {live} live descendants, and with {count} more "
                f"it would have more than {self.live_max}",
                budget="live",
                root=source.root,
            )

    def check_private(self, source: Sandbox, private_bytes: int) -> None:
        """Return if the tree of `source` may have more than the `private_bytes` that it holds.

        Raises:
            BudgetError: It may not.
        """
        if private_bytes >= self.private_mib_max * _MIB:
            raise BudgetError(
                f"the tree of {source.root} holds {private_bytes // _MIB} MiB of its own, of the "
                f"{self.private_mib_max} MiB that a tree may",
                budget="private_memory",
                root=source.root,
            )


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One place in a tree.

    Attributes:
        id: Who is there, or was.
        sandbox: The sandbox; None if it is gone.
        private_bytes: Private memory of its machine; None unless it runs.
        children: What was branched from it, the oldest first.
    """

    id: SandboxId
    sandbox: Sandbox | None
    private_bytes: int | None
    children: tuple[TreeNode, ...]


def grow(
    sandboxes: Iterable[Sandbox], private_bytes: Mapping[SandboxId, int | None]
) -> tuple[TreeNode, ...]:
    """Return every tree that `sandboxes`, the oldest first, are in."""
    known = {sandbox.id: sandbox for sandbox in sandboxes}
    children: dict[SandboxId | None, dict[SandboxId, None]] = {}
    for sandbox in known.values():
        above: SandboxId | None = None
        for id_ in (*sandbox.ancestors, sandbox.id):
            children.setdefault(above, {})[id_] = None
            above = id_

    def node(id_: SandboxId) -> TreeNode:
        below = tuple(node(child) for child in children.get(id_, ()))
        return TreeNode(id_, known.get(id_), private_bytes.get(id_), below)

    return tuple(node(root) for root in children.get(None, ()))


def descendants(sandbox: SandboxId, sandboxes: Iterable[Sandbox]) -> tuple[Sandbox, ...]:
    """Return those of `sandboxes` that were branched from `sandbox`, directly or not."""
    return tuple(each for each in sandboxes if sandbox in each.ancestors)


def count_live(root: SandboxId, sandboxes: Iterable[Sandbox]) -> int:
    """Return how many descendants of a tree's root have not ended."""
    found = descendants(root, sandboxes)
    return sum(each.state is not SandboxState.EXITED for each in found)
