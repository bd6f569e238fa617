"""`forkd snapshot`: make, list, look, remove, compact, tidy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import render
from forkd.cli.context import Json, shared
from forkd.cli.host import prepared
from forkd.cli.names import machine
from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from forkd.wire.v2 import SnapshotInfo

commands = typer.Typer(help="Make, list and remove snapshots.", no_args_is_help=True)

Tag = Annotated[str, typer.Argument(help="Name of a snapshot.", show_default=False)]
Recipe = Annotated[
    str | None, typer.Option("--recipe", "-r", help="A recipe's name, folder or TOML file.")
]
From = Annotated[
    str | None,
    typer.Option("--from", help="Id of a sandbox; with --exec, name of a snapshot."),
]
FromSandbox = Annotated[str | None, typer.Option("--from-sandbox", hidden=True)]
"""What `--from` was called for sandboxes."""
Exec = Annotated[
    str | None, typer.Option("--exec", help="Shell command to run in a fork of the snapshot.")
]
ExecTimeout = Annotated[
    float | None, typer.Option("--exec-timeout", help="Time limit of the command, in seconds.")
]
Network = Annotated[
    list[str] | None,
    typer.Option(help="What the fork may reach while the command runs; see `forkd fork`."),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return before the snapshot is written.")]


@commands.command()
def create(  # noqa: PLR0913 - one for each option
    tag: Tag,
    recipe: Recipe = None,
    *,
    from_: From = None,
    from_sandbox: FromSandbox = None,
    exec_: Exec = None,
    exec_timeout: ExecTimeout = None,
    network: Network = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Create a snapshot: of a recipe, of a sandbox, or of a fork in which a command has run."""
    if sum(given is not None for given in (recipe, from_, from_sandbox)) != 1:
        raise InvalidRequest("give either --recipe or --from", field="source")
    source = from_ or from_sandbox
    if source is None and (exec_ is not None or no_wait or network):
        raise InvalidRequest("--exec, --network and --no-wait go with --from", field="exec")
    with shared.client(as_json=json) as client, render.steps(as_json=json) as steps:
        if source is None:
            named = prepared(recipe or "", client, steps)
            made = client.snapshots.create(tag, named, on_progress=steps)
        else:
            made = client.snapshots.link(
                tag,
                machine(client, source),
                exec=exec_,
                exec_timeout_s=exec_timeout,
                network=network or None,
                wait=not no_wait,
                on_progress=steps,
            )
    if json:
        render.document(made)
    else:
        render.note(_made(made))


def _made(made: SnapshotInfo) -> str:
    """Say what was made, in a line."""
    shape = f"{made.memory_mib} MiB, {made.vcpus} vCPUs"
    if made.parent_tag is None:
        return f"snapshot {made.tag}: {shape}"
    stood = "" if made.pause_ms is None else f", its source was paused for {made.pause_ms:.1f} ms"
    stored = "being written" if made.status == "writing" else render.mib(made.stored_bytes)
    return f"snapshot {made.tag} over {made.parent_tag}: {stored}{stood}"


@commands.command("ls")
def list_(*, json: Json = False) -> None:
    """List snapshots."""
    with shared.client(as_json=json) as client:
        found = client.snapshots.list()
    if json:
        render.document(found)
        return
    columns = (
        *("tag", "status", "parent", "depth", "recipe", "vcpus", "memory", "disk", "stored"),
        *("sandboxes", "age"),
    )
    rows = [
        (
            each.tag,
            each.status,
            each.parent_tag,
            each.chain_depth,
            each.recipe,
            each.vcpus,
            f"{each.memory_mib} MiB",
            f"{each.disk_mib} MiB",
            render.mib(each.stored_bytes),
            each.sandboxes,
            render.age(each.created_at_unix),
        )
        for each in found
    ]
    render.table(columns, rows)


@commands.command()
def info(tag: Tag, *, json: Json = False) -> None:
    """Describe one snapshot."""
    with shared.client(as_json=json) as client:
        found = client.snapshots.info(tag)
    if json:
        render.document(found)
        return
    members = found.model_dump(mode="json")
    members["shared_fraction"] = f"{found.shared_fraction:.0%}"
    members["ancestors"] = ", ".join(found.ancestors) or None
    members["dependents"] = ", ".join(found.dependents) or None
    members["sandbox_ids"] = ", ".join(found.sandbox_ids) or None
    render.table(("what", "value"), list(members.items()))


@commands.command("rm")
def remove(
    tags: Annotated[list[str], typer.Argument(help="Names of snapshots.")],
    *,
    cascade: Annotated[
        bool, typer.Option("--cascade", help="Delete dependent snapshots, too.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Delete even if other snapshots depend on them; those become unusable."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Delete snapshots on which no sandbox and no other snapshot depends."""
    with shared.client(as_json=json) as client:
        for tag in tags:
            client.snapshots.delete(tag, cascade=cascade, force=force)
    if json:
        render.document({"removed": tags})


@commands.command()
def share(tag: Tag, *, json: Json = False) -> None:
    """Let every tenant use a snapshot."""
    _share(tag, shared_=True, json=json)


@commands.command()
def unshare(tag: Tag, *, json: Json = False) -> None:
    """Stop sharing a snapshot with other tenants."""
    _share(tag, shared_=False, json=json)


def _share(tag: str, *, shared_: bool, json: bool) -> None:
    with shared.client(as_json=json) as client:
        made = client.snapshots.share(tag, shared=shared_)
    if json:
        render.document(made)


@commands.command()
def compact(
    tag: Tag,
    to: Annotated[
        str | None, typer.Option("--to", help="Name of the compacted copy (default: in place).")
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Compact a snapshot's chain into one snapshot; those that depend on it keep working."""
    with shared.client(as_json=json) as client:
        made = client.snapshots.compact(tag, to)
    if json:
        render.document(made)
    else:
        render.note(f"snapshot {made.tag}: {render.mib(made.stored_bytes)}, needs no other")


@commands.command()
def gc(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be deleted.")
    ] = False,
    json: Json = False,
) -> None:
    """Delete unused files: leftovers, failed and orphaned snapshots, unused images."""
    with shared.client(as_json=json) as client:
        done = client.snapshots.gc(dry_run=dry_run)
    if json:
        render.document(done)
        return
    rows = [(each.kind, each.name, render.mib(each.bytes)) for each in done.removed]
    if rows:
        render.table(("kind", "name", "size"), rows)
    render.note(f"{render.mib(done.bytes)} {'would be freed' if dry_run else 'freed'}")
