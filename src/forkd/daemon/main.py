"""`forkd-daemon`: serve this host, examine it, or build an image.

Settings come from flags, and else from the environment; `forkd.daemon.settings` lists them.  The
exit status is 0 if it worked, 1 if it did not, 2 for a wrong command line or setting.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from forkd.daemon import commands
from forkd.daemon.settings import from_environment
from forkd.errors import ForkdError, InvalidRequest

app = typer.Typer(
    help="The forkd daemon.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Flag = Annotated[str | None, typer.Option(show_default=False)]


@app.command()
def serve(  # noqa: PLR0913 - one for each setting
    *,
    socket: Flag = None,
    socket_mode: Flag = None,
    bind: Flag = None,
    token_file: Flag = None,
    state_dir: Flag = None,
    run_dir: Flag = None,
    cache_dir: Flag = None,
    log: Annotated[Path | None, typer.Option(help="Append the log to this file.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it listens.")] = False,
) -> None:
    """Serve until SIGTERM.  Prints one line of JSON when it listens."""
    given = {key: value for key, value in locals().items() if key not in {"log", "detach"}}
    flags = {f"FORKD_{key.upper()}": value for key, value in given.items() if value is not None}
    settings = from_environment({**os.environ, **flags})
    raise typer.Exit(commands.serve(settings, log_file=log, detach=detach))


@app.command()
def doctor(
    state_dir: Flag = None,
    cache_dir: Flag = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find out what this host can do, by trying, and say what to do about the rest."""
    given = {"FORKD_STATE_DIR": state_dir, "FORKD_CACHE_DIR": cache_dir}
    flags = {key: value for key, value in given.items() if value is not None}
    raise typer.Exit(commands.doctor(from_environment({**os.environ, **flags}), as_json=json))


@app.command()
def build(recipe: Path, cache_dir: Flag = None) -> None:
    """Build the image of a recipe, unless it is built already."""
    flags = {} if cache_dir is None else {"FORKD_CACHE_DIR": cache_dir}
    raise typer.Exit(commands.build(from_environment({**os.environ, **flags}), recipe))


def main() -> None:
    """Run the command line; an error of ours is a message, not a traceback."""
    try:
        app()
    except ForkdError as error:
        sys.stderr.write(f"error: {error} ({error.code})\n")
        sys.exit(2 if isinstance(error, InvalidRequest) else 1)


if __name__ == "__main__":
    main()
