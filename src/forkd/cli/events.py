"""`forkd events`: what happens to sandboxes and snapshots."""

from __future__ import annotations

import json as json_text
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import render
from forkd.cli.context import shared
from forkd.cli.options import Json

if TYPE_CHECKING:
    from forkd.cli.help_text import Commands
    from forkd.wire.v2_events import EventInfo


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.command()(events)


def events(
    *,
    after: Annotated[
        int | None,
        typer.Option(
            metavar="ID",
            help="Only events after the one with this id (all that are kept unless set; with "
            "--follow, new ones).",
            min=0,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new events until interrupted.")
    ] = False,
    json: Json = False,
) -> None:
    """List events of sandboxes and snapshots.

    With --json each line is one JSON object.

    Examples:
      forkd events
      forkd events --follow --json
    """
    if after is None and not follow:
        after = 0
    with shared.client(as_json=json) as client:
        for event in client.events(after, follow=follow):
            sys.stdout.write((_document(event) if json else _line(event)) + "\n")
            sys.stdout.flush()


def _document(event: EventInfo) -> str:
    return json_text.dumps(render.plain(event), separators=(",", ":"))


def _line(event: EventInfo) -> str:
    when = datetime.fromtimestamp(event.at_unix, UTC).isoformat(timespec="milliseconds")
    # As JSON, so that nothing that a guest has said can do anything to a terminal.
    about = (f"{name}={json_text.dumps(value)}" for name, value in event.detail.items())
    return "  ".join([when, f"{event.id:>8}", f"{event.event:<18}", event.subject or "-", *about])
