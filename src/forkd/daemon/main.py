"""`forkd-daemon`: serve this host, examine it, leave it, or build an image.

Settings come from flags, else from the environment, else from a file; `forkd.daemon.settings`
declares them.
The exit status is 0 if it worked, 1 if it did not, 2 for a wrong command line or setting, and 75
if the daemon cannot go on and should be started again.
"""

from __future__ import annotations

import sys
from json import dumps as to_json
from pathlib import Path
from typing import Annotated

import typer

from forkd.daemon import commands, config_commands, host_setup, service_commands
from forkd.daemon.flags import EVERY, with_settings
from forkd.daemon.settings import Settings
from forkd.errors import ForkdError, InvalidRequest

app = typer.Typer(
    help="The forkd daemon.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
service_commands.register(host_setup.commands)
app.add_typer(host_setup.commands, name="host")
app.add_typer(config_commands.app, name="config")


@app.command()
@with_settings(*EVERY)
def serve(
    given: Settings,
    *,
    log: Annotated[Path | None, typer.Option(help="Append the log to this file.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it listens.")] = False,
) -> None:
    """Serve until SIGTERM.  Prints one line of JSON when it listens."""
    raise typer.Exit(commands.serve(given, log_file=log, detach=detach))


@app.command()
@with_settings("state_dir", "cache_dir")
def doctor(
    given: Settings,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find out what this host can do, by trying, and say what to do about the rest."""
    raise typer.Exit(commands.doctor(given, as_json=json))


@app.command()
@with_settings("run_dir", "state_dir", "cache_dir", "disk_dir", "socket")
def uninstall(
    given: Settings,
    *,
    state: Annotated[
        bool, typer.Option("--state", help="Remove snapshots, images and the database, too.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """End all sandboxes, and remove what this host's daemon has left: it must not run."""
    raise typer.Exit(commands.uninstall(given, state=state, as_json=json))


@app.command()
@with_settings("cache_dir")
def build(given: Settings, recipe: Path) -> None:
    """Build the image of a recipe, unless it is built already."""
    raise typer.Exit(commands.build(given, recipe))


def main() -> None:
    """Run the command line; an error of ours is a message, not a traceback."""
    try:
        app()
    except ForkdError as error:
        members = {"error": str(error), "code": error.code, "context": error.context}
        as_json, text = "--json" in sys.argv, f"error: {error} ({error.code})"
        sys.stderr.write(f"{to_json(members) if as_json else text}\n")
        sys.exit(2 if isinstance(error, InvalidRequest) else 1)


if __name__ == "__main__":
    main()
