"""The `forkd` command.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | failed: host, storage, VM, or some of several sandboxes; code of `forkd eval` raised |
| 2 | the command line, or a value in it, is wrong |
| 3 | no such sandbox, snapshot, recipe or file |
| 4 | wrong state for this operation |
| 5 | the token is missing, wrong, or not allowed to do this |
| 6 | the host is full, or the tenant's quota is used up |
| 7 | no daemon answers |
| 124 | timed out: `--timeout` of `exec`, `eval` and `wait` |
| 130 | interrupted |
| 141 | output pipe closed |

`forkd exec` exits with the exit code of the program, or 128 + n if signal n ended the program.
Otherwise it exits with 124 if the program timed out, 125 if forkd failed, 126 if the program
cannot be executed, and 127 if there is no such program.
"""

from __future__ import annotations

from typing import Annotated

import typer

import forkd
from forkd.cli.context import shared
from forkd.cli.group import Group
from forkd.cli.options import CaFile, ContextName, Json, Output, Token, Url
from forkd.errors import InvalidRequest

app = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:  # noqa: FBT001 - Typer's callback
    if value:
        typer.echo(f"forkd {forkd.__version__}")
        raise typer.Exit


@app.callback()
def options(  # noqa: PLR0913 - one for each option
    *,
    url: Url = None,
    context: ContextName = None,
    token: Token = None,
    ca_file: CaFile = None,
    output: Output = None,
    json: Json = False,
    version: Annotated[  # noqa: ARG001 - acts by its callback
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Fork, branch and run microVM sandboxes."""
    if json and output not in {None, "json"}:
        raise InvalidRequest("--json and --output exclude each other", field="output")
    shared.url, shared.token, shared.ca_file, shared.context = url, token, ca_file, context
    shared.output = "json" if json else output
    shared.as_json = shared.output == "json"


def main() -> None:
    """Run the command line."""
    app()
