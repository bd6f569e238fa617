"""Where a request's ASGI scope has what surrounds it."""

from __future__ import annotations

CALLER = "forkd.caller"
"""Its `Caller`."""

HELD = "forkd.held"
"""An `ExitStack` that is closed when the request is over, its answer sent."""

END = "forkd.end"
"""What to call to end the request: who asked may not any more."""

PEER_UID = "forkd.peer_uid"
"""In the scope's `state`: the user at the other end of a Unix socket."""

PEER_PID = "forkd.peer_pid"
"""Likewise: its process, as it was when it connected."""

VISITOR = "forkd.visitor"
"""Likewise: the `Visitor` whose connection it is; over a Unix socket there is none."""

ANYBODY = "anybody"
"""Principal of who asks without a token what anybody may ask."""

REQUESTS = "forkd.requests"
"""The application with all that surrounds requests, for those that are made in its name."""

MCP_PATH = "/mcp"
"""Where agents find tools."""

MCP_METADATA_PATHS = (
    f"/.well-known/oauth-protected-resource{MCP_PATH}",
    "/.well-known/oauth-protected-resource",
)
"""Where they find how to be let in."""

OPEN_PATHS = frozenset({"/healthz", "/healthz/", "/readyz", "/readyz/", *MCP_METADATA_PATHS})
"""What anybody may ask, of everything that listens."""
