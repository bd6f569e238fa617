"""`forkd-daemon config`: what the daemon would be set to, and by whom."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Annotated

import typer

from forkd.daemon import config_file, settings
from forkd.daemon.flags import EVERY, with_settings
from forkd.daemon.settings import Settings
from forkd.daemon.tls import certificates

app = typer.Typer(help="Show or check the daemon's settings.", no_args_is_help=True)


@app.command()
@with_settings(*EVERY)
def show(
    given: Settings,
    *,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List all settings with their values, and which flag, variable or line of a file set each."""
    rows = []
    for name in EVERY:
        origin = given.origins.get(name)
        value = settings.default(name) if origin is None else settings.shown(origin.text)
        rows.append((name, value, "default" if origin is None else origin.where))
    if json_:
        keys = ("name", "value", "from")
        listed = [dict(zip(keys, row, strict=True)) for row in rows]
        sys.stdout.write(json.dumps({"settings": listed}) + "\n")
        return
    widths = [max(len(row[at]) for row in rows) for at in (0, 1)]
    for name, value, where in rows:
        sys.stdout.write(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {where}\n")


@app.command()
def check(
    file: Annotated[
        str | None,
        typer.Argument(help="The configuration file.", show_default="where the daemon looks"),
    ] = None,
) -> None:
    """Check the configuration file and the files of TLS that it names; change nothing."""
    loaded = config_file.load(file)
    if loaded.path is None:
        sys.stdout.write(f"there is no {config_file.default_path()}: the defaults hold\n")
        return
    found = settings.read({}, partial(config_file.load, file), overrides=False)
    certificates(found)
    sys.stdout.write(f"{loaded.path} is valid: settings {len(loaded.values)}\n")
