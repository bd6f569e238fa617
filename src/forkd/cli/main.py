"""The `forkd` command.

| exit status | meaning |
|---|---|
| 0 | it worked |
| 1 | it did not: the host, the store, a machine or some of several sandboxes failed |
| 2 | the command line, or a value in it, is wrong |
| 3 | there is no such sandbox, snapshot, recipe or file |
| 4 | it exists, but its state forbids this |
| 5 | the token is missing or wrong |
| 6 | the host is full, or the tenant has no more quota |
| 7 | no daemon answers |
| 130 | interrupted |
| 141 | whoever read our output left |

`forkd exec` ends with the exit code of the program, 128 + n if signal n ended it, and otherwise
with 124 if it timed out, 125 if forkd failed, 126 if the program cannot be executed, 127 if
there is no such program.
"""

from __future__ import annotations

from typing import Annotated

import typer

import forkd
from forkd.cli import commands
from forkd.cli.context import CaFile, Token, Url, shared
from forkd.cli.group import Group

app = typer.Typer(
    cls=Group,
    help="fork(2) for virtual machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:  # noqa: FBT001 - Typer's callback
    if value:
        typer.echo(f"forkd {forkd.__version__}")
        raise typer.Exit


@app.callback()
def options(
    url: Url = None,
    token: Token = None,
    ca_file: CaFile = None,
    version: Annotated[  # noqa: ARG001, FBT002 - acts by its callback
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """fork(2) for virtual machines."""
    shared.url, shared.token, shared.ca_file, shared.as_json = url, token, ca_file, False


commands.register(app)


def main() -> None:
    """Run the command line."""
    app()
