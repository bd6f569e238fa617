"""Every tool, in the order in which clients list them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forkd.mcp import files, programs, sandboxes, snapshots, trees

if TYPE_CHECKING:
    from forkd.mcp.call import Tool

TOOLS: dict[str, Tool[Any, Any]] = {
    name: tool
    for each in (sandboxes, programs, files, trees, snapshots)
    for name, tool in each.box.tools.items()
}
"""Tools by their names."""
