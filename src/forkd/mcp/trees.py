"""Tools that copy running sandboxes, take them back, and compare them."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.mcp import fields
from forkd.mcp.call import Arguments, Call, Result, Toolbox
from forkd.mcp.fields import NO_EFFECT, Failure, Network, Sandbox, SandboxName, Snapshot, Tag, Ttl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.wire.v2_trees import TreeNode

box = Toolbox()


class BranchSandbox(Arguments):
    """A running sandbox to copy."""

    sandbox_id: SandboxName
    n: int | None = Field(
        default=None,
        ge=0,
        le=limits.MCP_FORK_COUNT_MAX,
        description="How many live copies to start. Left out, none: a snapshot is stored instead.",
    )
    tag: Tag | None = Field(
        default=None,
        description="Store this instant as a snapshot of that name. Left out, and without n, the "
        "snapshot gets a name that is made up.",
    )
    ttl_secs: Ttl = limits.MCP_TTL_S_DEFAULT
    network: Network | None = Field(
        default=None, description="What each copy may reach; null for what the source may."
    )
    hold: bool = Field(
        default=False, description="The copies may reach nothing on the network until promoted."
    )
    diff: bool = Field(default=False, description=NO_EFFECT)
    measure_diff: bool = Field(default=False, description=NO_EFFECT)
    mode: Literal["full", "diff", "live"] | None = Field(default=None, description=NO_EFFECT)
    wait: bool = Field(
        default=True, description="False: answer while the snapshot is still being written."
    )


class Branched(Result):
    """What became of a branch."""

    sandboxes: list[Sandbox] = Field(description="The live copies.")
    failures: list[Failure] = Field(description="Why others did not become ready.")
    tag: str | None = Field(description="The name of the snapshot, if one was stored.")
    snapshot: Snapshot | None
    pause_ms: float = Field(description="For how long the source was paused.")


@box.tool(BranchSandbox, Branched)
async def branch_sandbox(call: Call, args: BranchSandbox) -> Branched:
    """Copy a running sandbox at this instant, with its memory, processes and files.

    With n it starts that many live copies (siblings), each of which goes on from there: try n
    approaches in parallel, then promote_sandbox the best one. Without n, or with tag, it stores
    the instant as a snapshot, a checkpoint that spawn_sandboxes can fork any time later. The
    source is paused for milliseconds and goes on.
    """
    sandbox = await call.sandbox(args.sandbox_id)
    n, tag = args.n or 0, args.tag
    if args.n == 0 and tag is None:
        raise InvalidRequest("n: 0 copies are possible only with a tag", field="n")
    if n == 0 and tag is None:
        tag = f"branch-{sandbox.id[:20]}-{int(time.time())}-{secrets.token_hex(2)}"
    made = await sandbox.try_branch(
        n,
        tag=tag,
        wait=args.wait,
        ttl_s=args.ttl_secs,
        network=args.network,
        hold_egress=args.hold,
    )
    return Branched(
        sandboxes=[fields.sandbox(each.info) for each in made.sandboxes],
        failures=[fields.failure(each) for each in made.failures],
        tag=None if made.snapshot is None else made.snapshot.tag,
        snapshot=None if made.snapshot is None else fields.snapshot(made.snapshot),
        pause_ms=made.pause_ms,
    )


class OneSandbox(Arguments):
    """A sandbox."""

    sandbox_id: SandboxName


class WasReset(Result):
    """A sandbox that is where it began."""

    id: str
    reset_ms: float


@box.tool(OneSandbox, WasReset, destroys=True, repeatable=True)
async def reset_sandbox(call: Call, args: OneSandbox) -> WasReset:
    """Roll a sandbox back to the moment it was spawned or branched: undo everything since.

    It keeps its id. Files, processes and variables that came after that moment are lost.
    """
    sandbox = await call.sandbox(args.sandbox_id)
    return WasReset(id=sandbox.id, reset_ms=await sandbox.reset())


class Promoted(Result):
    """A sandbox that has taken its parent's place."""

    sandbox: Sandbox = Field(description="The promoted one, under its parent's id.")
    ended: list[str] = Field(description="The ids of those that were deleted for it.")


@box.tool(OneSandbox, Promoted, destroys=True)
async def promote_sandbox(call: Call, args: OneSandbox) -> Promoted:
    """Keep this branch: it takes over its parent's id, name and address.

    The parent and the other branches of it are deleted. Use it at the end of a search, on the
    best of the copies that branch_sandbox started.
    """
    sandbox = await call.sandbox(args.sandbox_id)
    ended = await sandbox.promote()
    return Promoted(sandbox=fields.sandbox(sandbox.info), ended=ended)


class DiffSandboxes(Arguments):
    """Two machines."""

    before: Annotated[
        str, Field(pattern=limits.TAG_PATTERN, description="A sandbox's id, or a snapshot's tag.")
    ]
    after: Annotated[
        str, Field(pattern=limits.TAG_PATTERN, description="What to compare with it, likewise.")
    ]


class Change(Result):
    """A file that differs."""

    path: str
    change: Literal["added", "changed", "removed"]
    size_bytes: int


class Difference(Result):
    """How one machine differs from another."""

    changes: list[Change] = Field(description="By path.")
    more: int = Field(description="How many others there are.")
    pages_apart: int | None = Field(description="Pages of memory that they do not share.")


@box.tool(DiffSandboxes, Difference, reads=True)
async def diff_sandboxes(call: Call, args: DiffSandboxes) -> Difference:
    """Compare the files of two related sandboxes or snapshots: added, changed, removed."""
    found = await call.client.diff(args.before, args.after)
    shown = found.changes[: limits.MCP_LISTED_MAX]
    return Difference(
        changes=[
            Change(path=each.path, change=each.change, size_bytes=each.size_bytes) for each in shown
        ],
        more=found.more + len(found.changes) - len(shown),
        pages_apart=found.pages_apart,
    )


class ShowTree(Arguments):
    """Which tree."""

    sandbox_id: SandboxName | None = Field(
        default=None, description="Only the tree that this sandbox is in; null for all."
    )


class Node(Result):
    """A place in a tree."""

    id: str
    parent_id: str | None = Field(description="What it was branched from.")
    depth: int
    status: Literal["starting", "running", "stopping", "exited", "gone"]
    private_bytes: int | None = Field(description="Memory that it shares with no other.")


class Tree(Result):
    """Who was branched from whom."""

    nodes: list[Node] = Field(description="Each one's branches follow it.")
    more: int = Field(description="How many others there are.")


@box.tool(ShowTree, Tree, reads=True)
async def show_tree(call: Call, args: ShowTree) -> Tree:
    """Show which sandbox was branched from which, with the memory that each holds."""
    found = await call.client.tree(args.sandbox_id)
    nodes = [node for root in found.roots for node in _below(root, None, 0)]
    return Tree(
        nodes=nodes[: limits.MCP_LISTED_MAX], more=max(0, len(nodes) - limits.MCP_LISTED_MAX)
    )


def _below(node: TreeNode, parent: str | None, depth: int) -> Iterator[Node]:
    yield Node(
        id=node.id,
        parent_id=parent,
        depth=depth,
        status=node.status,
        private_bytes=node.private_bytes,
    )
    for child in node.children:
        yield from _below(child, node.id, depth + 1)
