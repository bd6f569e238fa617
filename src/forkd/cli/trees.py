"""`forkd branch`, `reset`, `promote`, `tree`, `diff`: running sandboxes as a whole."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from forkd.cli import complete, render
from forkd.cli.context import EXIT_ERROR, shared
from forkd.cli.names import machine, pairs, sandbox_id
from forkd.cli.options import HoldEgress, Id, Json, Label, Network, Ttl
from forkd.cli.sandbox_info import outcomes
from forkd.cli.units import shown_size

if TYPE_CHECKING:
    from forkd.cli.help_text import Commands
    from forkd.sdk import Branch, Sandbox
    from forkd.wire.v2 import SandboxInfo
    from forkd.wire.v2_trees import TreeInfo, TreeNode

SIGNS = {"added": "+", "changed": "~", "removed": "-"}
"""What stands before a file that differs."""

STYLES = {"running": "green", "exited": "red", "gone": "dim"}
"""How a sandbox's status looks in a tree."""


def register(app: Commands) -> None:
    """Add the commands of this file."""
    for command in (branch, reset, promote, tree, diff):
        app.command()(command)


def branch(  # noqa: PLR0913 - one for each option
    sandbox: Id,
    n: Annotated[
        int | None,
        typer.Option(
            "-n", "--n", metavar="N", help="Number of siblings (1 unless set; 0 with --tag)."
        ),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(metavar="TAG", help="Also save this moment as snapshot TAG."),
    ] = None,
    *,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="Wait until the snapshot is written, or return at once."
        ),
    ] = True,
    ttl: Ttl = None,
    label: Label = None,
    network: Network = None,
    hold_egress: HoldEgress = False,
    json: Json = False,
) -> None:
    """Copy a running sandbox into siblings and print their ids.

    Siblings continue from the same moment, and so does the sandbox.  They have its labels and its
    network rules, unless --label and --network give them others.

    Examples:
      forkd branch sb-7q66th9abcde
      forkd branch sb-7q66th9abcde -n 5 --ttl 10m
      forkd branch sb-7q66th9abcde --tag checkpoint
    """
    count = n if n is not None else int(tag is None)
    with shared.client(as_json=json) as client:
        source = client.sandboxes.get(sandbox)
        made = source.try_branch(
            count,
            tag=tag,
            wait=wait,
            ttl_s=ttl,
            labels=pairs(label, "--label") or None,
            network=network or None,
            hold_egress=hold_egress,
        )
    if json:
        times = {"pause_ms": made.pause_ms, "stall_ms": made.stall_ms}
        made_of_it = outcomes(made.sandboxes, made.failures)
        render.document({**times, "sandboxes": made_of_it, "snapshot": made.snapshot})
    else:
        _show_branch(made)
    if made.failures:
        raise typer.Exit(EXIT_ERROR)


def _show_branch(made: Branch[Sandbox]) -> None:
    for each in made.sandboxes:
        typer.echo(each.id)
    for failure in made.failures:
        render.note(f"{failure.id} failed in {failure.stage}: {failure.error} ({failure.code})")
    if made.snapshot is not None:
        render.note(f"snapshot {made.snapshot.tag} is {made.snapshot.status}")
    ready, failed = len(made.sandboxes), len(made.failures)
    stall = "" if made.stall_ms is None else f", and saw a stall of {made.stall_ms:.1f} ms at most"
    stood = f"the source was paused for {made.pause_ms:.1f} ms{stall}"
    render.note(f"{ready} ready, {failed} failed; {stood}")


def reset(sandbox: Id, *, json: Json = False) -> None:
    """Roll a sandbox back to the moment it was forked.

    It keeps its id and its address.  Its programs end, and its files are as they were.

    Examples:
      forkd reset sb-7q66th9abcde
    """
    with shared.client(as_json=json) as client:
        found = client.sandboxes.get(sandbox)
        reset_ms = found.reset()
    if json:
        render.document({"id": found.id, "reset_ms": reset_ms})
    else:
        render.note(f"{found.id} is as it was when it was forked ({reset_ms:.1f} ms)")


def promote(sandbox: Id, *, json: Json = False) -> None:
    """Keep this branch: it takes over its parent's id; parent and siblings are deleted.

    It takes over the parent's address, too.

    Examples:
      forkd promote sb-7q66th9abcde
    """
    with shared.client(as_json=json) as client:
        found = client.sandboxes.get(sandbox)
        before = found.id
        ended = found.promote()
    if json:
        render.document({"sandbox": found.info, "ended": ended})
        return
    typer.echo(found.id)
    render.note(f"{before} is {found.id} now; {len(ended)} ended")


def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A sandbox or a snapshot.", autocompletion=complete.machines
        ),
    ],
    b: Annotated[
        str,
        typer.Argument(
            metavar="B", help="A sandbox or a snapshot.", autocompletion=complete.machines
        ),
    ],
    *,
    json: Json = False,
) -> None:
    """List the files added (+), changed (~) and removed (-) from A to B.

    Examples:
      forkd diff numpy sb-7q66th9abcde
      forkd diff sb-7q66th9abcde sb-q4hd2mzwxyab
    """
    with shared.client(as_json=json) as client:
        found = client.diff(machine(client, a), machine(client, b))
    if json:
        render.document(found)
        return
    for each in found.changes:
        typer.echo(f"{SIGNS[each.change]} {each.path}")
    more = f" and {found.more} more" if found.more else ""
    apart = "" if found.pages_apart is None else f", {found.pages_apart} pages apart"
    render.note(f"{len(found.changes)} files{more} differ{apart}")


def tree(
    sandbox: Annotated[
        str | None,
        typer.Argument(
            metavar="SANDBOX",
            help="Only the tree of this sandbox.",
            autocompletion=complete.sandboxes,
        ),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Draw the tree of branches, with times and private memory.

    Examples:
      forkd tree
      forkd tree sb-7q66th9abcde
    """
    with shared.client(as_json=json) as client:
        found = client.tree(sandbox and sandbox_id(client, sandbox))
    if json:
        render.document(found)
    else:
        show(found)


def show(found: TreeInfo) -> None:
    """Print trees, and how far each may grow."""
    for root in found.roots:
        drawn = Tree(_label(root), guide_style="dim")
        _add(drawn, root)
        render.printed(drawn)
    limits = found.limits
    render.note(
        f"{len(found.roots)} shown; a tree may have {limits.live} live descendants, "
        f"{limits.depth} branches deep, and {limits.private_mib} MiB of its own"
    )


def _add(drawn: Tree, node: TreeNode) -> None:
    for child in node.children:
        _add(drawn.add(_label(child)), child)


def _label(node: TreeNode) -> Text:
    label = Text(node.id, style="dim" if node.sandbox is None else "")
    status = node.status if node.sandbox is None else node.sandbox.condition
    label.append(f"  {status}", style=STYLES.get(status, ""))
    if node.sandbox is not None:
        label.append(f"  {_origin(node.sandbox)}", style="dim")
        if node.private_bytes is not None:
            label.append(f"  {shown_size(node.private_bytes)}", style="cyan")
        if node.sandbox.exit_reason is not None:
            label.append(f"  ({node.sandbox.exit_reason})", style="red")
    return label


def _origin(sandbox: SandboxInfo) -> str:
    """Return when a sandbox began, and from which instant of what."""
    if sandbox.branched_at_unix_ms is None:
        return f"{render.age(sandbox.created_at_unix)} old, of {sandbox.snapshot_tag}"
    seconds, milliseconds = divmod(sandbox.branched_at_unix_ms, 1_000)
    instant = datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S")
    return f"{render.age(seconds)} old, branched at {instant}.{milliseconds:03d} UTC"
