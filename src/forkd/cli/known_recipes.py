"""The recipes that can be given by name: the daemon's, and those whose images are built here."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.sdk import Client
    from forkd.wire.v2_images import HostRecipe


def known(client: Client) -> list[HostRecipe]:
    """Return the recipes that can be given by name, by name."""
    from forkd.cli import local_builds  # noqa: PLC0415 - `forkd --help` should not wait for it

    found = {each.name: each for each in client.recipes.list()}
    for path in local_builds.recipes_here(client):
        found.setdefault(path.parent.name, _listed(path))
    return [found[name] for name in sorted(found)]


def _listed(path: Path) -> HostRecipe:
    """Return a recipe of this host as a daemon lists its own."""
    from forkd.wire.v2_images import HostRecipe  # noqa: PLC0415 - as above

    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return HostRecipe(name=path.parent.name, description="", error=str(error))
    image = said.get("image")
    base = image.get("base") if isinstance(image, dict) else None
    return HostRecipe(
        name=path.parent.name,
        description=str(said.get("description", "")),
        base=None if base is None else str(base),
    )
