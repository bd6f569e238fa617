"""What a shell offers when TAB is pressed: names that the daemon knows.

A shell waits, so the daemon has a short deadline.  Where it is away nothing is offered, and no
error is shown.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import typer  # noqa: TC002 - typer reads annotations when it runs

from forkd.cli.known_recipes import known

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.sdk import Client

DEADLINE_S = 1.0
"""How long a shell waits for what the daemon knows."""


def sandboxes(ctx: typer.Context, incomplete: str) -> list[Any]:
    """Return sandboxes by id and by name, each with its snapshot and status."""
    return _asked(
        ctx,
        incomplete,
        lambda client: [
            (name, f"{each.info.snapshot_tag}, {each.info.condition}")
            for each in client.sandboxes.list()
            for name in (each.info.id, each.info.name)
            if name is not None
        ],
    )


def snapshots(ctx: typer.Context, incomplete: str) -> list[Any]:
    """Return the names of snapshots."""
    return _asked(
        ctx,
        incomplete,
        lambda client: [
            (each.tag, f"{each.memory_mib} MiB, {each.status}") for each in client.snapshots.list()
        ],
    )


def machines(ctx: typer.Context, incomplete: str) -> list[Any]:
    """Return sandboxes, then snapshots."""
    return [*sandboxes(ctx, incomplete), *snapshots(ctx, incomplete)]


def recipes(ctx: typer.Context, incomplete: str) -> list[Any]:
    """Return the recipes that can be given by name."""
    return _asked(
        ctx,
        incomplete,
        lambda client: [
            (each.name, each.description) for each in known(client) if each.error is None
        ],
    )


def contexts(incomplete: str) -> list[str]:
    """Return the names of contexts."""
    from forkd.errors import ForkdError  # noqa: PLC0415 - shells alone need it
    from forkd.sdk import _contexts  # noqa: PLC0415 - as above

    try:
        names = [_contexts.LOCAL, *sorted(_contexts.load().by_name)]
    except ForkdError:
        return []
    return [each for each in names if each.startswith(incomplete)]


def formats(incomplete: str) -> list[str]:
    """Return the formats that have a name."""
    return [each for each in ("wide", "json", "jsonl") if each.startswith(incomplete)]


def _asked(
    ctx: typer.Context, incomplete: str, ask: Callable[[Client], list[tuple[str, str]]]
) -> list[tuple[str, str]]:
    """Ask the daemon, for a short time."""
    found: list[tuple[str, str]] = []
    options = ctx.find_root().params

    def look() -> None:
        from forkd.cli.context import Shared  # noqa: PLC0415 - shells alone need it
        from forkd.errors import ForkdError  # noqa: PLC0415 - as above

        said = Shared(
            url=options.get("url"),
            token=options.get("token"),
            ca_file=options.get("ca_file"),
            context=options.get("context"),
        )
        try:
            with said.client() as client:
                found.extend(ask(client))
        except ForkdError:
            return

    asking = threading.Thread(target=look, daemon=True)
    asking.start()
    asking.join(DEADLINE_S)
    return [each for each in list(found) if each[0].startswith(incomplete)]
