"""Images that are built on this host, for a daemon in the helper machine of this host.

The helper machine is a program of Unix: where Python lacks Unix's modules, as on Windows, nothing
is built here, and a recipe goes to the daemon as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd import installed
from forkd.sdk._endpoint import state_dir
from forkd.sdk._recipes import find_local

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.machine.build import Memory, Progress
    from forkd.sdk import Client


def prepared(
    recipe: str, client: Client, steps: Progress, memory: Memory | None = None
) -> Path | str:
    """Return what a client is given for a recipe, its image built here if it should be."""
    found = find_local(recipe) or recipe
    if not installed.has_unix_modules():
        return found
    from forkd.machine import build  # noqa: PLC0415 - most commands need no helper machine

    return build.prepare(found, client.endpoint.url, state_dir(), steps, memory=memory)


def prepared_to_bake(
    recipe: str, client: Client, steps: Progress, memory_mib: int | None
) -> Path | str:
    """Return the same for a recipe whose machine is baked, if there is memory for it."""
    if not installed.has_unix_modules():
        return prepared(recipe, client, steps)
    from forkd.machine.build import Memory  # noqa: PLC0415 - as above

    room = Memory(lambda: client.host().memory_total_mib, memory_mib)
    return prepared(recipe, client, steps, room)


def recipes_here(client: Client) -> list[Path]:
    """Return the TOML files of the recipes that `prepared` finds by name, by name."""
    if not installed.has_unix_modules():
        return []
    from forkd.machine import build  # noqa: PLC0415 - as above

    return build.recipes_here(client.endpoint.url, state_dir())
