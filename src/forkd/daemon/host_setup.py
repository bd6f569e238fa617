"""`forkd-daemon host`: say how this host is set up."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from forkd import checks
from forkd.host import proc, refusals, tuning
from forkd.service import tuning_checks

commands = typer.Typer(help="How this host is set up.", no_args_is_help=True)


@commands.command()
def check(*, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say how this host is set up; change nothing.  Status 1: something fails."""
    found = tuning_checks.judge(
        tuning.look(),
        is_root=proc.is_root(),
        hides_clone3=refusals.hides_clone3(),
        is_jailed=False,
        own_cores=refusals.schedules_cores(),
    )
    sys.stdout.write((checks.as_json(found) if json else checks.as_text(found)) + "\n")
    raise typer.Exit(checks.exit_status(found))
