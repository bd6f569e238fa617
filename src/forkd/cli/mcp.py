"""`forkd mcp`: the daemon's sandboxes as tools for AI agents."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import forkd
from forkd.cli.context import shared
from forkd.errors import HostError

if TYPE_CHECKING:
    from forkd.cli.help_text import Commands


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.command("mcp")(serve)


def serve() -> None:
    """Serve sandboxes as MCP tools over standard input and output, for AI agents.

    An agent's program, such as Claude Code or Cursor, starts this command by itself.

    Examples:
      forkd mcp
      forkd --url https://forkd.example:8889 mcp
    """
    if find_spec("mcp") is None:
        raise HostError(
            "the package `mcp` is not installed: `pip install 'forkd[mcp]'` installs it"
        )
    endpoint = shared.endpoint()
    from forkd.mcp.stdio import serve as serve_stdio  # noqa: PLC0415 - takes long to load

    serve_stdio(endpoint, forkd.__version__)
