"""`forkd context`: daemons that have a name, and which of them is used."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from forkd.cli import complete, render, tables
from forkd.cli.context import shared
from forkd.cli.help_text import Commands
from forkd.cli.options import Json, Output
from forkd.cli.prompts import hidden_once
from forkd.cli.tables import Column
from forkd.errors import InvalidRequest

commands = Commands(help="Choose among several daemons by name.")

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The name of a context.", autocompletion=complete.contexts),
]


@dataclass(frozen=True, slots=True)
class Row:
    """A context in a list; its token is not shown.

    Attributes:
        name: Its name.
        current: Whether it is used.
        url: The daemon's address.
        token: Whether it has a token.
    """

    name: str
    current: bool
    url: str | None
    token: bool


COLUMNS: tuple[Column[Row], ...] = (
    Column("NAME", lambda of: of.name),
    Column("CURRENT", lambda of: "yes" if of.current else None),
    Column("URL", lambda of: of.url or "the daemon of this host"),
    Column("TOKEN", lambda of: "yes" if of.token else None, minor=True),
)
"""What a list of contexts shows."""


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.add_typer(commands, name="context")


@commands.command("ls")
def list_(*, output: Output = None, json: Json = False) -> None:
    """List contexts.

    Examples:
      forkd context ls
    """
    from forkd.sdk import _contexts  # noqa: PLC0415 - a list of commands should not wait for it

    shared.as_json = json
    form = tables.chosen(output, as_json=json)
    known = _contexts.load()
    rows = [Row(_contexts.LOCAL, known.current is None, None, token=False)]
    rows += [
        Row(name, name == known.current, each.url, each.token is not None)
        for name, each in sorted(known.by_name.items())
    ]
    tables.show(rows, COLUMNS, form)


@commands.command()
def use(name: Name, *, json: Json = False) -> None:
    """Use a daemon from now on; `local` is the one of this host.

    FORKD_URL and --url have precedence over the context that is used.

    Examples:
      forkd context use ci
      forkd context use local
    """
    from forkd.sdk import _contexts  # noqa: PLC0415 - as above

    shared.as_json = json
    known = _contexts.load()
    known.use(name)
    known.save()
    _report("current", name, as_json=json)


@commands.command()
def add(  # noqa: PLR0913 - one for each option
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name for the daemon.")],
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="http[s]://HOST:PORT or unix:///PATH."),
    ],
    *,
    token: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="Its bearer token; - reads standard input."),
    ] = None,
    ca_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="CA certificates that verify the daemon's.")
    ] = None,
    client_cert: Annotated[
        str | None, typer.Option(metavar="PATH", help="Your own certificate.")
    ] = None,
    client_key: Annotated[str | None, typer.Option(metavar="PATH", help="Its private key.")] = None,
    use_: Annotated[bool, typer.Option("--use", help="Use the daemon from now on.")] = False,
    json: Json = False,
) -> None:
    """Name a daemon, so that --context and `forkd context use` find it.

    The token is kept in a file that only you can read.  `--token -` on a terminal asks for it
    without showing it.

    Examples:
      forkd context add ci https://ci.example.com:8889 --token - --use
      forkd context add lab unix:///run/forkd/forkd.sock
    """
    from forkd.sdk import Endpoint, _contexts  # noqa: PLC0415 - as above

    shared.as_json = json
    if token == "-":  # noqa: S105 - where it comes from
        token = hidden_once("Token") if sys.stdin.isatty() else sys.stdin.readline().strip()
        if not token:
            raise InvalidRequest("--token: standard input has no token", field="token")
    known = _contexts.load()
    Endpoint(url, token, ca_file, client_cert, client_key)
    known.add(name, _contexts.Context(url, token, ca_file, client_cert, client_key))
    if use_:
        known.use(name)
    known.save()
    _report("added", name, as_json=json)


@commands.command("rm")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME", help="The names of contexts.", autocompletion=complete.contexts
        ),
    ],
    *,
    json: Json = False,
) -> None:
    """Remove contexts, with their tokens.

    If the context that is used is removed, `local` is used from then on.

    Examples:
      forkd context rm ci
    """
    from forkd.sdk import _contexts  # noqa: PLC0415 - as above

    shared.as_json = json
    known = _contexts.load()
    for name in dict.fromkeys(names):
        known.remove(name)
    known.save()
    render.removed(names, as_json=json)


def _report(what: str, name: str, *, as_json: bool) -> None:
    if as_json:
        render.document({what: name})
    else:
        typer.echo(name)
