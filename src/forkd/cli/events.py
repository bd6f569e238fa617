"""`forkd events`: what happens to sandboxes and snapshots."""

from __future__ import annotations

import json as json_text
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli.context import Json, shared

if TYPE_CHECKING:
    from forkd.wire.v2_events import EventInfo


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(events)


def events(
    *,
    after: Annotated[
        int | None,
        typer.Option(
            help="Only events after the one with this id (default: all that are kept; with "
            "--follow, new ones).",
            show_default=False,
            min=0,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new events until interrupted.")
    ] = False,
    json: Json = False,
) -> None:
    """List events of sandboxes and snapshots; with --json one object a line."""
    if after is None and not follow:
        after = 0
    with shared.client(as_json=json) as client:
        for event in client.events(after, follow=follow):
            sys.stdout.write((event.model_dump_json() if json else _line(event)) + "\n")
            sys.stdout.flush()


def _line(event: EventInfo) -> str:
    when = datetime.fromtimestamp(event.at_unix, UTC).isoformat(timespec="milliseconds")
    # As JSON, so that nothing that a guest has said can do anything to a terminal.
    about = (f"{name}={json_text.dumps(value)}" for name, value in event.detail.items())
    return "  ".join([when, f"{event.id:>8}", f"{event.event:<18}", event.subject or "-", *about])
