"""`forkd up` and `down`: the daemon, and where it runs."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from forkd.cli import render
from forkd.cli.context import shared
from forkd.cli.options import Json
from forkd.cli.sandboxes import kill_each
from forkd.errors import InvalidRequest, NotFound, TransportError
from forkd.machine import lifecycle
from forkd.machine.kernel import default_cache
from forkd.sdk import Client
from forkd.sdk._endpoint import state_dir

if TYPE_CHECKING:
    from forkd.cli.help_text import Commands

Choice = Literal["auto", "native", "helper"]


def register(app: Commands) -> None:
    """Add the commands of this file."""
    for command in (up, down):
        app.command()(command)


def up(
    mode: Annotated[
        Choice,
        typer.Option(
            help="auto: native if this host's KVM works, else helper; native: on this host; "
            "helper: inside a QEMU VM."
        ),
    ] = "auto",
    *,
    json: Json = False,
) -> None:
    """Start the forkd daemon: on this host, or in a helper VM where KVM is not usable.

    A daemon that runs already is left as it is.

    Examples:
      forkd up
      forkd up --mode helper
    """
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


def down(
    *,
    purge: Annotated[
        bool,
        typer.Option(
            "--purge", help="Remove snapshots, images and kernels, too: all that forkd has stored."
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("-y", "--yes", help="With --purge: remove it without asking.")
    ] = False,
    json: Json = False,
) -> None:
    """Stop all sandboxes, the daemon and the helper VM.

    Snapshots are kept, unless --purge is given. Keys, contexts and the settings
    of `forkd host setup` are kept in any case.

    Examples:
      forkd down
      forkd down --purge
    """
    shared.as_json = json
    if purge and not yes:
        _ask_to_purge(as_json=json)
    try:
        daemon = lifecycle.find(state_dir())
    except NotFound:
        daemon = None
    if daemon is not None and daemon.mode == "native":
        # What does not end in order is ended with the daemon.
        with contextlib.suppress(TransportError), Client(daemon.url) as client:
            kill_each(client.sandboxes.list())
    ran, left = (
        lifecycle.purge(state_dir(), default_cache())
        if purge
        else (lifecycle.down(state_dir()), [])
    )
    if json:
        render.document({"was_running": ran})
        return
    render.note("forkd has ended" if ran else "no forkd was running")
    if purge:
        render.note("what it had stored is removed")
    for each in left:
        render.note(f"left, because forkd has not made it: {each}")


def _ask_to_purge(*, as_json: bool) -> None:
    """Return if what forkd has stored may be removed.

    Raises:
        InvalidRequest: There is nobody to ask.
    """
    if as_json or not sys.stdin.isatty():
        raise InvalidRequest(
            "--purge asks before it removes anything, and there is no terminal to ask on; "
            "`forkd down --purge --yes` does not ask",
            field="yes",
        )
    question = f"Remove all snapshots, images and kernels in {state_dir()} and {default_cache()}?"
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)
