"""`forkd up`, `down`, `doctor`, `build` and `host`: the daemon, where it runs, what it needs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from forkd.cli import render
from forkd.cli.context import Json, shared
from forkd.cli.sandboxes import kill_each
from forkd.errors import NotFound, TransportError
from forkd.machine import build as image_building
from forkd.machine import lifecycle
from forkd.sdk import Client
from forkd.sdk._endpoint import state_dir
from forkd.sdk._recipes import find_local

if TYPE_CHECKING:
    from pathlib import Path

Choice = Literal["auto", "native", "helper"]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for command in (up, down, doctor, build, host):
        app.command()(command)


def up(
    mode: Annotated[Choice, typer.Option(help="Where machines run.")] = "auto",
    *,
    json: Json = False,
) -> None:
    """Start the daemon, on this host or in the helper machine, unless it is running."""
    shared.as_json = json
    tell = (lambda _: None) if json else render.note
    daemon = lifecycle.up(state_dir(), mode=None if mode == "auto" else mode, progress=tell)
    if json:
        render.document(_as_json(daemon))
    else:
        where = "on this host" if daemon.mode == "native" else "in the helper machine"
        render.note(f"forkd runs {where}, at {daemon.url}")


def _as_json(daemon: lifecycle.RunningDaemon) -> dict[str, Any]:
    token_file = None if daemon.token_file is None else str(daemon.token_file)
    return {"url": daemon.url, "token_file": token_file, "mode": daemon.mode}


def down(*, json: Json = False) -> None:
    """Stop all sandboxes, the daemon and the helper machine; snapshots are kept."""
    shared.as_json = json
    try:
        daemon = lifecycle.find(state_dir())
    except NotFound:
        daemon = None
    if daemon is not None and daemon.mode == "native":
        # What does not end in order is ended with the daemon.
        with contextlib.suppress(TransportError), Client(daemon.url) as client:
            kill_each(client.sandboxes.list())
    ran = lifecycle.down(state_dir())
    if json:
        render.document({"was_running": ran})
    else:
        render.note("forkd has ended" if ran else "no forkd was running")


def doctor(*, json: Json = False) -> None:
    """Check what this host supports, and how to fix what it does not."""
    command = [sys.executable, "-m", "forkd.daemon", "doctor", *(["--json"] if json else [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)  # noqa: S603 - our own program


def build(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, folder or TOML file.")],
    *,
    json: Json = False,
) -> None:
    """Build the image of a recipe, unless it is built already."""
    with shared.client(as_json=json) as client, render.steps(as_json=json) as steps:
        made = client.images.build(prepared(recipe, client, steps), on_progress=steps)
    if json:
        render.document(made)
    else:
        render.note(f"image {made.name}: {made.key}")


def prepared(recipe: str, client: Client, steps: render.Steps) -> Path | str:
    """Return what a client is given for a recipe, its image built here if it should be."""
    found = find_local(recipe) or recipe
    return image_building.prepare(found, client.endpoint.url, state_dir(), steps)


def host(*, json: Json = False) -> None:
    """Show the daemon's host: version, memory, disk, sandboxes."""
    with shared.client(as_json=json) as client:
        found = client.host()
    if json:
        render.document(found)
    else:
        render.table(("what", "value"), list(found.model_dump(mode="json").items()))
