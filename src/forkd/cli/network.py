"""`forkd network`: what a sandbox may reach, and what it was refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import render
from forkd.cli.context import Json, shared
from forkd.cli.sandboxes import Id  # noqa: TC001 - Typer reads it at run time
from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from forkd.wire.v2_network import NetworkInfo

LISTED_MAX = 20
"""Most lines of each list; `--json` has all."""


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(network)


def network(  # noqa: PLR0913 - one for each option
    sandbox: Id,
    *,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="Also allow this rule (see `forkd fork --network`); may be repeated."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Allow this and nothing else; may be repeated."),
    ] = None,
    deny_all: Annotated[bool, typer.Option("--deny-all", help="Allow nothing.")] = False,
    hold: Annotated[
        bool | None,
        typer.Option("--hold/--release", help="Refuse all connections, or stop doing so."),
    ] = None,
    json: Json = False,
) -> None:
    """Show what a sandbox may reach and what it was refused, or change what it may reach."""
    if bool(allow) + bool(set_) + deny_all > 1:
        raise InvalidRequest("give one of --allow, --set and --deny-all", field="allow")
    rules = ["deny-all"] if deny_all else set_
    with shared.client(as_json=json) as client:
        found = client.sandboxes.get(sandbox)
        if rules or allow or hold is not None:
            shown = found.network.change(rules or None, allow=allow or (), hold_egress=hold)
        else:
            shown = found.network.status()
    if json:
        render.document(shown)
    else:
        _show(shown)


def _show(shown: NetworkInfo) -> None:
    held = "; held: it may reach nothing now" if shown.egress_held else ""
    for rule in shown.network or ["(nothing)"]:
        typer.echo(rule)
    render.note(f"{shown.guest_addr}, by {shown.gateway_addr}{held}")
    if shown.guest_addr_v6 is not None:
        render.note(f"{shown.guest_addr_v6}, by {shown.gateway_addr_v6}")
    render.note(
        f"refused: {shown.refused_packets} packets, {shown.refused_questions} questions for names"
    )
    rows: list[tuple[str, str | None, int, str | None]] = [
        (each.name, None, each.questions, each.why) for each in shown.refused_names[:LISTED_MAX]
    ]
    rows += [
        (each.address, f"{each.port or ''}/{each.protocol}", each.packets, None)
        for each in shown.refused_destinations[:LISTED_MAX]
    ]
    if rows:
        render.table(("refused", "port", "times", "why"), rows)
