"""`forkd ping`, `version` and `help`: whether it answers, what it is, how it is used."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

import forkd
from forkd.cli import complete, render, tables
from forkd.cli.context import exit_code, shared
from forkd.cli.options import Json, Output
from forkd.cli.units import shown_duration
from forkd.errors import ForkdError, InvalidRequest

if TYPE_CHECKING:
    from forkd.cli.help_text import Commands


def register(app: Commands) -> None:
    """Add the commands of this file."""
    for name, command in (("ping", ping), ("version", version), ("help", help_)):
        app.command(name)(command)


def ping(
    sandbox: Annotated[
        str | None,
        typer.Argument(
            metavar="SANDBOX",
            help="Ask the agent in this sandbox instead.",
            autocompletion=complete.sandboxes,
        ),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Ask the daemon, or the agent in a sandbox, whether it answers.

    Examples:
      forkd ping
      forkd ping sb-7q66th9abcde
    """
    with shared.client(as_json=json) as client:
        found = None if sandbox is None else client.sandboxes.get(sandbox)
        start = time.perf_counter()
        answer = client.version() if found is None else found.ping()
        took_ms = (time.perf_counter() - start) * 1_000
        url = client.endpoint.url
    if json:
        members: Any = render.plain(answer)
        render.document({**members, "took_ms": took_ms})
    elif found is None:
        typer.echo(f"forkd {answer.version} at {url} answers ({took_ms:.1f} ms)")
    else:
        said: Any = answer
        up = shown_duration(said.uptime_s)
        typer.echo(f"{found.id} answers ({took_ms:.1f} ms): up {up}, runtime {said.runtime}")


def version(*, output: Output = None, json: Json = False) -> None:
    """Show the versions of this command and of the daemon.

    Examples:
      forkd version
    """
    form = tables.chosen(output, as_json=json)
    members: dict[str, object] = {"client": forkd.__version__, "daemon": None, "url": None}
    failed: ForkdError | None = None
    try:
        with shared.client(as_json=json) as client:
            members |= {"url": client.endpoint.url, "daemon": client.version().version}
    except ForkdError as error:
        failed = error
    labels = [("Client", members["client"]), ("Daemon", members["daemon"]), ("URL", members["url"])]
    tables.detail(members, labels, form)
    if failed is not None:
        render.failure(failed, as_json=json)
        raise typer.Exit(exit_code(failed))


def help_(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", help="A command.")] = None,
) -> None:
    """Show the help of a command.

    Examples:
      forkd help
      forkd help snapshot create
    """
    context: Any = ctx.find_root()
    for word in words or ():
        command = getattr(context.command, "commands", {}).get(word)
        if command is None:
            raise InvalidRequest(
                f"there is no command '{context.command_path} {word}'; `forkd help` lists commands"
            )
        context = type(context)(command, info_name=word, parent=context)
    typer.echo(context.get_help())
