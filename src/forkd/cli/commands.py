"""Every command, from the file of its noun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.cli import (
    audit,
    copy,
    events,
    guests,
    host,
    keys,
    network,
    packs,
    rights,
    sandboxes,
    secrets,
    snapshots,
    top,
    trees,
)

if TYPE_CHECKING:
    import typer


def register(app: typer.Typer) -> None:
    """Add every command."""
    for module in (host, sandboxes, trees, network, guests, copy, packs, events, top, audit):
        module.register(app)
    app.add_typer(snapshots.commands, name="snapshot")
    app.add_typer(keys.commands, name="key")
    app.add_typer(rights.tokens, name="token")
    app.add_typer(rights.tenants, name="tenant")
    app.add_typer(secrets.commands, name="secret")
