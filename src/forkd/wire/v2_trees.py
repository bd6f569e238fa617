"""Requests and answers of version 1 about running sandboxes as a whole: branches, trees, diffs.

The rules are those of `wire.v2`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forkd import limits
from forkd.wire.parts import Answer, Labels, Network, Number, Page, Request, Tag, TtlSecs
from forkd.wire.v2 import ForkOutcome, SandboxInfo, SandboxStatus, SnapshotInfo


class BranchCreate(Request):
    """Branch a running sandbox into siblings, write its instant down, or both."""

    n: int | None = Field(
        default=None,
        ge=0,
        le=limits.FORK_COUNT_MAX,
        description="How many siblings; left out, 1, or none if there is a `tag`.",
    )
    tag: Tag | None = Field(default=None, description="Also keep this instant as a snapshot.")
    wait: bool = Field(default=True, description="Answer when the snapshot is ready.")
    all_or_nothing: bool = Field(
        default=False, description="If one fails, end those that are ready and answer an error."
    )
    deadline_secs: Number = Field(
        default=limits.FORK_DEADLINE_S_DEFAULT,
        ge=limits.FORK_DEADLINE_S_MIN,
        le=limits.FORK_DEADLINE_S_MAX,
        description="Time each sibling has until its agent has answered.",
    )
    ttl_secs: TtlSecs | None = Field(
        default=None,
        description="Each sibling is ended after this time; null: never, `default`: after the "
        "daemon's `FORKD_SANDBOX_TTL_S`.",
    )
    labels: Labels | None = Field(
        default=None, description="Those of each sibling; left out, the source's."
    )
    hold_egress: bool = Field(
        default=False, description="Each sibling may reach nothing until it is promoted."
    )
    network: Network | None = Field(
        default=None, description="What each may reach; left out, what the source may."
    )


class BranchInfo(Answer):
    """What became of a branch."""

    pause_ms: float = Field(
        description="How long the source was paused: first vCPU stopped to last one running."
    )
    stall_ms: float | None = Field(
        default=None,
        description="The longest time for which the source's guest saw itself paused, from "
        "just before the pause until siblings had answered, to a millisecond; null if that is "
        "not known.",
    )
    stall_unknown: str | None = Field(default=None, description="Why `stall_ms` is not known.")
    branched_at_unix_ms: int = Field(description="The instant that siblings and snapshot share.")
    sandboxes: list[ForkOutcome] = Field(description="One for each sibling, the ready ones first.")
    snapshot: SnapshotInfo | None = None


class Reset(Request):
    """Take a sandbox back to its fork point, in place."""

    deadline_secs: Number = Field(
        default=limits.FORK_DEADLINE_S_DEFAULT,
        ge=limits.FORK_DEADLINE_S_MIN,
        le=limits.FORK_DEADLINE_S_MAX,
        description="Time it has until its agent has answered.",
    )


class ResetInfo(Answer):
    """A sandbox is at its fork point again."""

    reset_ms: float


class PromotionInfo(Answer):
    """A sandbox has its parent's place."""

    sandbox: SandboxInfo = Field(description="The promoted one, under its parent's id.")
    ended: list[str] = Field(
        description="Who ended for it; the old parent under the id that the promoted one had."
    )


class DiffCreate(Request):
    """Compare two machines: ids of running sandboxes, or names of snapshots."""

    a: Tag = Field(description="The one before.")
    b: Tag = Field(description="The one after.")


class FileChange(Answer):
    """One file that differs."""

    path: str
    change: Literal["added", "changed", "removed"]
    kind: str = Field(description="f, d, l, or another letter of find's.")
    size_bytes: int


class DiffInfo(Answer):
    """How `b` differs from `a`."""

    changes: list[FileChange] = Field(description="By path.")
    more: int = Field(description="How many others there are, beyond what an answer holds.")
    pages_apart: int | None = Field(
        description="Pages of memory that they do not share; None if that cannot be said."
    )


class TreeFilter(Page):
    """Which tree, or which part of the list of all."""

    sandbox_id: str | None = Field(
        default=None,
        max_length=limits.ID_CHARS_MAX,
        description="Only the one that it is, or was, in; a name is taken, too.",
    )


class TreeLimits(Answer):
    """How far one tree may grow; what would exceed one is refused with code `budget`."""

    live: int = Field(description="Live descendants of its root.")
    depth: int = Field(description="Branches between its root and any descendant.")
    private_mib: int = Field(description="Private memory of its machines.")


class TreeNode(Answer):
    """One place in a tree: a sandbox, or where one was."""

    id: str
    status: SandboxStatus | Literal["gone"]
    sandbox: SandboxInfo | None = Field(description="None if it is gone.")
    private_bytes: int | None = Field(
        description="Private memory of its machine; None unless it runs."
    )
    children: list[TreeNode] = Field(description="What was branched from it, the oldest first.")


class TreeInfo(Answer):
    """Who was branched from whom."""

    limits: TreeLimits
    roots: list[TreeNode] = Field(description="Forks of snapshots, the oldest first.")
