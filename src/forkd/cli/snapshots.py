"""`forkd snapshot`: make, list, look, remove, compact, tidy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import complete, render, tables
from forkd.cli.context import shared
from forkd.cli.help_text import Commands
from forkd.cli.images import Image, MachineDisk, MachineMemory, Ready, Run, Vcpus
from forkd.cli.local_builds import prepared_to_bake
from forkd.cli.names import machine, network_rule
from forkd.cli.options import Json, NewTag, NoTrunc, Output, Tag, Tags
from forkd.cli.tables import Column, short_ids, time_shown
from forkd.cli.units import MIB, counted, duration, shown_size
from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from forkd.wire.v2 import RemovedInfo, SnapshotInfo, SnapshotInfoDetail

commands = Commands(help="Create, list and remove snapshots.")

Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        metavar="RECIPE",
        help="A recipe's name, folder or TOML file.",
        autocompletion=complete.recipes,
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="SOURCE",
        help="A running sandbox; or, with --exec, a snapshot.",
        autocompletion=complete.machines,
    ),
]
FromSandbox = Annotated[str | None, typer.Option("--from-sandbox", hidden=True)]
"""What `--from` was called for sandboxes."""
Exec = Annotated[
    str | None,
    typer.Option(
        "--exec", metavar="COMMAND", help="Shell command to run in a fork of the snapshot."
    ),
]
ExecTimeout = Annotated[
    float | None,
    typer.Option(
        "--exec-timeout", metavar="DURATION", parser=duration, help="Time limit of the command."
    ),
]
Network = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RULE",
        parser=network_rule,
        help="What the fork may reach while the command runs; see `forkd fork --help`.",
    ),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return before the snapshot is written.")]


@commands.command()
def create(  # noqa: PLR0913 - one for each option
    tag: NewTag,
    recipe: Recipe = None,
    *,
    image: Image = None,
    run: Run = None,
    ready: Ready = None,
    memory: MachineMemory = None,
    vcpus: Vcpus = None,
    disk: MachineDisk = None,
    from_: From = None,
    from_sandbox: FromSandbox = None,
    exec_: Exec = None,
    exec_timeout: ExecTimeout = None,
    network: Network = None,
    no_wait: NoWait = False,
    json: Json = False,
) -> None:
    """Create a snapshot from an image, a recipe, a sandbox, or a command on another snapshot.

    Examples:
      forkd snapshot create py --image python:3.12-slim --memory 1g --run 'mkdir /work'
      forkd snapshot create numpy --recipe python-numpy
      forkd snapshot create checkpoint --from sb-7q66th9abcde
      forkd snapshot create torch --from numpy --network internet --exec 'pip install torch'
    """
    if sum(given is not None for given in (image, recipe, from_, from_sandbox)) != 1:
        raise InvalidRequest("give one of --image, --recipe and --from", field="source")
    source = from_ or from_sandbox
    if source is not None and any((run, ready, memory, vcpus, disk)):
        raise InvalidRequest(
            "--run, --ready, --memory, --vcpus and --disk go with --image or --recipe; use --exec "
            "with --from",
            field="run",
        )
    if source is None and (exec_ is not None or no_wait or network):
        raise InvalidRequest("--exec, --network and --no-wait go with --from", field="exec")
    with shared.client(as_json=json) as client, render.steps(as_json=json) as steps:
        if source is None:
            made = client.snapshots.create(
                tag,
                None if recipe is None else prepared_to_bake(recipe, client, steps, memory),
                image=image,
                run=run or (),
                ready=ready,
                memory_mib=memory,
                vcpus=vcpus,
                disk_mib=disk,
                on_progress=steps,
            )
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
    shape = f"{shown_size(made.memory_mib * MIB)}, {counted(made.vcpus, 'vCPU')}"
    if made.parent_tag is None:
        return f"snapshot {made.tag}: {shape}"
    stood = "" if made.pause_ms is None else f", its source was paused for {made.pause_ms:.1f} ms"
    stored = "being written" if made.status == "writing" else shown_size(made.stored_bytes)
    return f"snapshot {made.tag} over {made.parent_tag}: {stored}{stood}"


@commands.command("ls")
def list_(*, output: Output = None, json: Json = False) -> None:
    """List snapshots.

    Examples:
      forkd snapshot ls
      forkd snapshot ls -o wide
    """
    form = tables.chosen(output, as_json=json)
    with shared.client(as_json=json) as client:
        found = client.snapshots.list()
    tables.show(found, COLUMNS, form)


@commands.command()
def info(tag: Tag, *, no_trunc: NoTrunc = False, output: Output = None, json: Json = False) -> None:
    """Describe one snapshot.

    Examples:
      forkd snapshot info numpy
      forkd snapshot info numpy -o '{stored_bytes}'
    """
    form = tables.chosen(output, as_json=json)
    with shared.client(as_json=json) as client:
        found = client.snapshots.info(tag)
    tables.detail(found, _labels(found, whole_ids=no_trunc), form)


def _labels(of: SnapshotInfoDetail, *, whole_ids: bool) -> list[tuple[str, object]]:
    """Return what there is to say of a snapshot, with labels."""
    shared_ = f", {of.shared_fraction:.0%} of it shared with ancestors" if of.ancestors else ""
    shown = {each: each for each in of.sandbox_ids} if whole_ids else short_ids(of.sandbox_ids)
    memory = shown_size(of.memory_mib * MIB)
    return [
        ("Tag", of.tag),
        ("Status", of.status if of.bootable or of.status != "ready" else "not usable"),
        ("Error", of.error),
        ("Created", f"{time_shown(of.created_at_unix)} ({render.age(of.created_at_unix)} ago)"),
        ("Created by", of.created_by),
        ("Tenant", f"{of.tenant}{' (shared with all tenants)' if of.shared else ''}"),
        ("Recipe", of.recipe),
        ("Runtime", of.runtime),
        ("Machine", f"{counted(of.vcpus, 'vCPU')}, {memory} memory, {_disk(of)} disk"),
        ("Processor", _cpu(of)),
        ("Stored", f"{shown_size(of.stored_bytes)} of its own"),
        ("With ancestors", f"{shown_size(of.chain_bytes)}{shared_}" if of.ancestors else None),
        ("Taken of", of.source_id),
        ("Source paused", None if of.pause_ms is None else f"{of.pause_ms:.1f} ms"),
        ("Ancestors", ", ".join(of.ancestors)),
        ("Dependents", ", ".join(of.dependents)),
        ("Sandboxes", ", ".join(shown[each] for each in of.sandbox_ids) or "none"),
        ("Image", of.image_key),
        ("Folder", of.dir),
    ]


def _cpu(of: SnapshotInfoDetail) -> str | None:
    if of.cpu is None:
        return None
    return f"{of.cpu.model}, {counted(len(of.cpu.features), 'feature')} that a host must have"


def _disk(of: SnapshotInfo) -> str:
    return shown_size(of.disk_mib * MIB)


COLUMNS: tuple[Column[SnapshotInfo], ...] = (
    Column("TAG", lambda of: of.tag),
    Column("STATUS", lambda of: of.status),
    Column("STORED", lambda of: shown_size(of.stored_bytes), right=True),
    Column("MEMORY", lambda of: shown_size(of.memory_mib * MIB), right=True, minor=True),
    Column("SANDBOXES", lambda of: of.sandboxes, right=True, minor=True),
    Column("AGE", lambda of: render.age(of.created_at_unix), minor=True),
    Column("PARENT", lambda of: of.parent_tag, optional=True),
    Column("RECIPE", lambda of: of.recipe, wide=True),
    Column("DEPTH", lambda of: of.chain_depth, wide=True, right=True),
    Column("VCPUS", lambda of: of.vcpus, wide=True, right=True),
    Column("DISK", _disk, wide=True, right=True),
    Column("TENANT", lambda of: of.tenant, wide=True),
)
"""What a list of snapshots shows."""

GC_COLUMNS: tuple[Column[RemovedInfo], ...] = (
    Column("KIND", lambda of: of.kind),
    Column("NAME", lambda of: of.name),
    Column("SIZE", lambda of: shown_size(of.bytes), right=True),
)
"""What a list of removed files shows."""


@commands.command("rm")
def remove(
    tags: Tags,
    *,
    cascade: Annotated[
        bool, typer.Option("--cascade", help="Also delete the snapshots that depend on them.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Delete them even if other snapshots depend on them; those become unusable.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Delete snapshots (refused while anything depends on them).

    Examples:
      forkd snapshot rm checkpoint
      forkd snapshot rm base --cascade
    """
    removed: list[str] = []
    with shared.client(as_json=json) as client:
        for tag in tags:
            client.snapshots.delete(tag, cascade=cascade, force=force)
            removed.append(tag)
            if not json:
                typer.echo(tag)
    if json:
        render.document({"removed": removed})


@commands.command()
def share(tag: Tag, *, json: Json = False) -> None:
    """Let every tenant use a snapshot.

    Examples:
      forkd snapshot share numpy
    """
    _share(tag, shared_=True, json=json)


@commands.command()
def unshare(tag: Tag, *, json: Json = False) -> None:
    """Stop sharing a snapshot with other tenants.

    Examples:
      forkd snapshot unshare numpy
    """
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
        str | None,
        typer.Option("--to", metavar="TAG", help="Name of a flattened copy (in place unless set)."),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Flatten a chain of snapshots into one.

    Snapshots and sandboxes that depend on it keep working.

    Examples:
      forkd snapshot compact checkpoint
      forkd snapshot compact checkpoint --to alone
    """
    with shared.client(as_json=json) as client:
        made = client.snapshots.compact(tag, to)
    if json:
        render.document(made)
    else:
        render.note(f"snapshot {made.tag}: {shown_size(made.stored_bytes)}, depends on no other")


@commands.command()
def gc(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be deleted.")
    ] = False,
    json: Json = False,
) -> None:
    """Delete unused files: leftovers, failed and orphaned snapshots, unused images.

    Examples:
      forkd snapshot gc --dry-run
      forkd snapshot gc
    """
    with shared.client(as_json=json) as client:
        done = client.snapshots.gc(dry_run=dry_run)
    if json:
        render.document(done)
        return
    if done.removed:
        tables.show(done.removed, GC_COLUMNS, tables.Format())
    render.note(f"{shown_size(done.bytes)} {'would be freed' if dry_run else 'freed'}")


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.add_typer(commands, name="snapshot")
