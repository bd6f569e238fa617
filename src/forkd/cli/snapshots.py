"""`forkd snapshot`: bake, list, look, remove."""

from __future__ import annotations

from typing import Annotated

import typer

from forkd.cli import recipes, render
from forkd.cli.context import Json, shared
from forkd.cli.host import prepared

commands = typer.Typer(help="Bake, list and remove snapshots.", no_args_is_help=True)

Tag = Annotated[str, typer.Argument(help="Name of a snapshot.", show_default=False)]
Recipe = Annotated[
    str, typer.Option("--recipe", "-r", help="A recipe's name, folder or TOML file.")
]


@commands.command()
def create(tag: Tag, recipe: Recipe, *, json: Json = False) -> None:
    """Build a recipe's image, boot it, warm it up, and keep it as a snapshot."""
    path = recipes.find(recipe)
    with shared.client(as_json=json) as client, render.steps(as_json=json) as steps:
        made = client.snapshots.create(tag, prepared(path, client, steps), on_progress=steps)
    if json:
        render.document(made)
    else:
        render.note(f"snapshot {made.tag}: {made.memory_mib} MiB, {made.vcpus} vCPUs")


@commands.command("ls")
def list_(*, json: Json = False) -> None:
    """List snapshots."""
    with shared.client(as_json=json) as client:
        found = client.snapshots.list()
    if json:
        render.document(found)
        return
    columns = ("tag", "status", "recipe", "vcpus", "memory", "disk", "stored", "sandboxes", "age")
    rows = [
        (
            each.tag,
            each.status,
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
    members["ancestors"] = ", ".join(found.ancestors) or None
    members["dependents"] = ", ".join(found.dependents) or None
    members["sandbox_ids"] = ", ".join(found.sandbox_ids) or None
    render.table(("what", "value"), list(members.items()))


@commands.command("rm")
def remove(
    tags: Annotated[list[str], typer.Argument(help="Names of snapshots.")], *, json: Json = False
) -> None:
    """Remove snapshots; refused while sandboxes need them."""
    with shared.client(as_json=json) as client:
        for tag in tags:
            client.snapshots.delete(tag)
    if json:
        render.document({"removed": tags})
