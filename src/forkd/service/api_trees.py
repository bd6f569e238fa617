"""What a front end may ask about trees of sandboxes: promotion, comparison, drawing.

The rules are those of `forkd.service.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from forkd.model.caller import Caller
    from forkd.model.diff import Difference
    from forkd.model.ids import SandboxId, Tag
    from forkd.model.sandbox import Promotion
    from forkd.model.tree import TreeBudgets, TreeNode


class Promotions(Protocol):
    """Children that take their parents' places.  Scope `run`."""

    async def promote(self, caller: Caller, sandbox: SandboxId) -> Promotion:
        """Let a sandbox take its parent's id, name, address and place.

        The parent ends, and all that was branched from it but the sandbox and its own.  A
        crash leaves this done or undone.

        Raises:
            Conflict: It has no parent, that is gone, it does not run, or its tree is changing.
            EngineError: It is promoted, but its guest did not take its new identity; that is
                tried again in the background.
        """
        ...


class Comparisons(Protocol):
    """Differences of machines.  Scope `run`."""

    async def compare(
        self, caller: Caller, before: SandboxId | Tag, after: SandboxId | Tag
    ) -> Difference:
        """Say how the files of one machine differ from another's, and how far memory does.

        Each is a running sandbox, or a snapshot.  A copy of each is made for as long as that takes,
        and their disks are compared; what is mounted over the root file system is not on them.

        Raises:
            Conflict: They have no common ancestor, or one does not run.
            BudgetError: The tree of one has no room for its copy.
            GuestError: The file system of one cannot be compared: it is damaged, of another kind,
                or has more files than a comparison looks at.
            CapacityError: The host has no room for what they have written, or too many are
                compared at once.
        """
        ...


class Trees(Protocol):
    """Who was branched from whom.  Scope `read`."""

    async def draw(self, caller: Caller, member: SandboxId | None = None) -> tuple[TreeNode, ...]:
        """Return every tree, or the one that a sandbox is, or was, in."""
        ...

    async def budgets(self, caller: Caller) -> TreeBudgets:
        """Return how far a tree may grow."""
        ...
