"""`forkd image`: the image cache; and the options of snapshots that are made of an image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import complete, render, tables
from forkd.cli.context import shared
from forkd.cli.help_text import Commands
from forkd.cli.options import Json, Output
from forkd.cli.tables import Column
from forkd.cli.units import shown_size, size_mib
from forkd.errors import Conflict, NotFound
from forkd.limits import VCPUS_MAX

if TYPE_CHECKING:
    from forkd.sdk import Client
    from forkd.wire.v2_images import CachedImageInfo

MACHINE = "Machine"
"""The section of the help that has what a new machine is like."""

Image = Annotated[
    str | None,
    typer.Option(
        "--image",
        metavar="IMAGE",
        help="An image of a registry, an OCI layout folder, a `docker save` or OCI archive, or a "
        "recipe.",
        autocompletion=complete.recipes,
    ),
]
Run = Annotated[
    list[str] | None,
    typer.Option(
        "--run",
        metavar="COMMAND",
        help="Shell command to run in the machine before it is frozen.",
    ),
]
Ready = Annotated[
    str | None,
    typer.Option(
        "--ready",
        metavar="COMMAND",
        help="Freeze the machine once this shell command exits with 0.",
    ),
]
MachineMemory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        parser=size_mib,
        rich_help_panel=MACHINE,
        help="Memory of each fork (MiB without a unit; 512m unless the recipe says otherwise).",
    ),
]
Vcpus = Annotated[
    int | None,
    typer.Option(
        "--vcpus", rich_help_panel=MACHINE, help=f"Virtual CPUs of each fork, 1 to {VCPUS_MAX}."
    ),
]
MachineDisk = Annotated[
    int | None,
    typer.Option(
        "--disk",
        metavar="SIZE",
        parser=size_mib,
        rich_help_panel=MACHINE,
        help="Disk size of each fork (MiB without a unit).",
    ),
]
Keys = Annotated[
    list[str],
    typer.Argument(metavar="IMAGE", help="Keys of images, or the beginnings of their keys."),
]

commands = Commands(help="List and remove built images.")

COLUMNS: tuple[Column[CachedImageInfo], ...] = (
    Column("IMAGE", lambda of: of.key, short=True),
    Column("NAME", lambda of: of.name),
    Column("SIZE", lambda of: shown_size(of.bytes), right=True),
    Column("USED", lambda of: f"{render.age(of.last_used_unix)} ago", minor=True),
    Column("SNAPSHOTS", lambda of: len(of.snapshots), right=True, minor=True),
    Column("REFERENCE", lambda of: of.reference, optional=True),
    Column("DIGEST", lambda of: of.digest, wide=True),
    Column("TENANT", lambda of: of.tenant, wide=True),
)
"""What a list of images shows."""


@commands.command("ls")
def list_(*, output: Output = None, json: Json = False) -> None:
    """List built images, the one that was used last first.

    Examples:
      forkd image ls
      forkd image ls -o '{key} {snapshots}'
    """
    form = tables.chosen(output, as_json=json)
    with shared.client(as_json=json) as client:
        found = client.images.list()
    tables.show(found, COLUMNS, form)


@commands.command("rm")
def remove(keys: Keys, *, json: Json = False) -> None:
    """Delete built images (refused while a snapshot needs them).

    Examples:
      forkd image rm 3f0c1a9d2b7e
    """
    removed: list[str] = []
    with shared.client(as_json=json) as client:
        for key in keys:
            whole = _whole(client, key)
            client.images.remove(whole)
            removed.append(whole)
            if not json:
                typer.echo(whole)
    if json:
        render.document({"removed": removed})


def _whole(client: Client, key: str) -> str:
    """Return the one key that begins so.

    Raises:
        NotFound: No key does.
        Conflict: Several do.
    """
    found = [each.key for each in client.images.list() if each.key.startswith(key)]
    if not found:
        raise NotFound(f"no image {key!r}; `forkd image ls` lists them", image=key)
    if len(found) > 1:
        raise Conflict(f"several images begin with {key!r}: {', '.join(found[:5])}", image=key)
    return found[0]


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.add_typer(commands, name="image")
