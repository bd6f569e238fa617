"""`forkd mcp`: the daemon's sandboxes as tools for AI agents."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import forkd
from forkd.cli import mcp_clients, render
from forkd.cli.context import shared
from forkd.cli.help_text import CommandGroup, Commands
from forkd.errors import HostError, InvalidRequest

if TYPE_CHECKING:
    from forkd.cli.mcp_clients import Change


class _Group(CommandGroup):
    """The commands; without one it serves."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's own types
        """Parse what is in front of a command."""
        return super().parse_args(ctx, args or ["serve"])


commands = Commands(help="Serve sandboxes as tools for AI agents (Model Context Protocol).")


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.add_typer(commands, name="mcp", cls=_Group)


@commands.command()
def serve() -> None:
    """Serve MCP tools over standard input and output; `forkd mcp` does the same.

    An agent's program, such as Claude Code or Cursor, starts this command by itself.

    Examples:
      forkd mcp serve
      forkd --url https://forkd.example:8889 mcp serve
    """
    if find_spec("mcp") is None:
        raise HostError(
            "the package `mcp` is not installed: `pip install 'forkd-vm[mcp]'` installs it"
        )
    endpoint = shared.endpoint()
    if sys.stdin.isatty():
        render.note("an agent's program starts this command; `forkd mcp install` sets one up")
    from forkd.mcp.stdio import serve as serve_stdio  # noqa: PLC0415 - takes long to load

    serve_stdio(endpoint, forkd.__version__)


@commands.command()
def install(
    client: Annotated[
        Literal["claude", "claude-desktop", "cursor", "vscode"],
        typer.Argument(
            metavar="CLIENT",
            help="`claude` (Claude Code) and `vscode` are set up for the current folder, "
            "`claude-desktop` and `cursor` for you.",
        ),
    ],
    *,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="What the client calls the server.")
    ] = "forkd",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be written.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write without asking.")] = False,
) -> None:
    """Add the server to the configuration of an agent's program.

    It shows the change first, and keeps everything else in the file. A daemon that is named by
    --url or --context is named in the configuration, too; a token is never written there.

    Examples:
      forkd mcp install claude --dry-run
      forkd --context build mcp install cursor --yes
    """
    if shared.url is not None and shared.context is not None:
        raise InvalidRequest("--url and --context exclude each other", field="context")
    front = [] if shared.url is None else ["--url", shared.url]
    front += [] if shared.context is None else ["--context", shared.context]
    change = mcp_clients.planned(client, name, front)
    _show(change)
    if dry_run or change.is_there:
        return
    if not yes and not _agreed(change):
        raise InvalidRequest("nothing was written: pass --yes to write it without a question")
    change.write()
    render.note(f"written; restart the program to have it start {name}")


def _show(change: Change) -> None:
    if change.is_there:
        render.note(f"{change.path} has it already; nothing to write")
        return
    typer.echo(f"{change.path}:")
    typer.echo(change.difference)


def _agreed(change: Change) -> bool:
    return sys.stdin.isatty() and typer.confirm(f"Write {change.path}?", err=True)
