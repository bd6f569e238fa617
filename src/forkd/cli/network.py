"""`forkd network`: what a sandbox may reach, and what it was refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import render, tables
from forkd.cli.context import shared
from forkd.cli.names import network_rule
from forkd.cli.options import Id, Json
from forkd.cli.tables import Column
from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from forkd.cli.help_text import Commands
    from forkd.wire.v2_network import NetworkInfo

LISTED_MAX = 20
"""Most lines of each list; `--json` has all."""

Refused = tuple[str, str | None, int, str | None]

COLUMNS: tuple[Column[Refused], ...] = (
    Column("REFUSED", lambda of: of[0]),
    Column("PORT", lambda of: of[1]),
    Column("TIMES", lambda of: of[2], right=True),
    Column("WHY", lambda of: of[3]),
)
"""What a list of refusals shows."""


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.command()(network)


def network(  # noqa: PLR0913 - one for each option
    sandbox: Id,
    *,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            parser=network_rule,
            help="Also allow this rule; `forkd fork --help` says what rules are.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="RULE", parser=network_rule, help="Allow these rules and nothing else."
        ),
    ] = None,
    deny_all: Annotated[bool, typer.Option("--deny-all", help="Allow nothing.")] = False,
    hold: Annotated[
        bool | None,
        typer.Option("--hold/--release", help="Block all egress, or lift the block."),
    ] = None,
    json: Json = False,
) -> None:
    """Show or change what a sandbox may reach.

    Without options it shows the rules, and what the sandbox was refused.

    Examples:
      forkd network sb-7q66th9abcde
      forkd network sb-7q66th9abcde --allow example.com:443
      forkd network sb-7q66th9abcde --hold
    """
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
    rows: list[Refused] = [
        (each.name, None, each.questions, each.why) for each in shown.refused_names[:LISTED_MAX]
    ]
    rows += [
        (each.address, f"{each.port or ''}/{each.protocol}", each.packets, None)
        for each in shown.refused_destinations[:LISTED_MAX]
    ]
    if rows:
        tables.show(rows, COLUMNS, tables.Format())
