"""`forkd audit`: who did what, out of the daemon's audit log."""

from __future__ import annotations

import json as json_library
import sys
from collections import deque
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import render, tables
from forkd.cli.audit_log import AuditFile, Wanted, default_path, parse_time
from forkd.cli.context import shared
from forkd.cli.options import Json
from forkd.cli.tables import Column

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forkd.cli.audit_log import Line
    from forkd.cli.help_text import Commands

COLUMNS = ("time", "principal", "tenant", "action", "result", "error", "ms", "remote", "objects")

MINOR = {"tenant", "error", "ms", "remote"}
"""Columns that a narrow terminal leaves out first."""

SHORT_TIME_WIDTH_MAX = 100
"""Width of a terminal that has room for month, day, hour and minute only."""

SHORT_TIME = slice(5, 16)
"""What is kept of a time then."""

WIDTHS = (23, 16, 10, 20, 9, 14, 9, 22, 0)
"""Of the columns of lines that are shown as they come."""

OBJECTS_SHOWN = 3
"""Objects that a row names; it counts the others."""

LINES_SHOWN = 1_000


def register(app: Commands) -> None:
    """Add the command of this file."""
    app.command()(audit)


def audit(  # noqa: PLR0913 - one for each filter
    *,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="From this time on: 2026-11-23T16:40 (UTC), 15m, 2h or 3d."
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before this time.")] = None,
    principal: Annotated[
        list[str],
        typer.Option(metavar="PRINCIPAL", help="Only this principal, such as `token:ci`."),
    ] = [],  # noqa: B006 - Typer copies it
    tenant: Annotated[list[str], typer.Option(metavar="TENANT", help="Only this tenant.")] = [],  # noqa: B006
    action: Annotated[
        list[str], typer.Option(metavar="ACTION", help="Only this action, such as `fork`.")
    ] = [],  # noqa: B006
    object_: Annotated[
        list[str],
        typer.Option("--object", metavar="ID", help="Only what touched this sandbox or snapshot."),
    ] = [],  # noqa: B006
    result: Annotated[
        list[str],
        typer.Option(
            metavar="RESULT", help="Only `ok`, `denied`, `refused`, `failed` or `cancelled`."
        ),
    ] = [],  # noqa: B006
    limit: Annotated[
        int, typer.Option(min=1, help="Number of lines to show: the newest.")
    ] = LINES_SHOWN,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until interrupted.")
    ] = False,
    file: Annotated[Path | None, typer.Option(help="The audit log to read.")] = None,
    json: Json = False,
) -> None:
    """Search the audit log of the daemon on this host.

    With --json its lines are printed as they are.

    Examples:
      forkd audit --since 2h --result denied
      forkd audit --principal token:ci --action fork --follow
    """
    shared.as_json = json
    members = {"principal": principal, "tenant": tenant, "action": action, "result": result}
    wanted = Wanted(
        since=None if since is None else parse_time(since, "since"),
        until=None if until is None else parse_time(until, "until"),
        members={name: frozenset(values) for name, values in members.items()},
        objects=tuple(object_),
    )
    log = AuditFile(file or default_path())
    found = log.read(wanted, follow=follow)
    if json:
        _print(json_library.dumps(line, separators=(",", ":")) for line in found)
    elif follow:
        _print([_fixed([each.upper() for each in COLUMNS])])
        _print(_fixed(_cells(line)) for line in found)
    else:
        _show(found, limit)
    if log.skipped:
        render.note(f"{log.skipped} lines were cut off, or are none of an audit log")


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def _fixed(cells: list[str]) -> str:
    return " ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def _show(found: Iterable[Line], limit: int) -> None:
    newest: deque[Line] = deque(maxlen=limit)
    count = 0
    for line in found:
        count += 1
        newest.append(line)
    width = render.terminal_width()
    rows = [_cells(line) for line in newest]
    if width is not None and width <= SHORT_TIME_WIDTH_MAX:
        rows = [[cells[0][SHORT_TIME], *cells[1:]] for cells in rows]
    tables.show(rows, TABLE, tables.Format())
    if count > limit:
        render.note(f"{count - limit} older lines are not shown; --limit shows more")


TABLE: tuple[Column[list[str]], ...] = tuple(
    Column(name.upper(), itemgetter(place), minor=name in MINOR)
    for place, name in enumerate(COLUMNS)
)
"""What lines that are shown at once have."""


def _cells(line: Line) -> list[str]:
    objects = [str(each) for each in line.get("objects", ())]
    shown = " ".join(objects[:OBJECTS_SHOWN])
    if "lost" in line:
        shown = f"{line['lost']} lines lost"
    elif len(objects) > OBJECTS_SHOWN:
        shown += f" and {len(objects) - OBJECTS_SHOWN} more"
    latency = line.get("latency_ms")
    values = (
        str(line["time"]).replace("T", " ")[:23],
        *(line.get(name) for name in ("principal", "tenant", "action", "result", "error")),
        None if latency is None else f"{latency:.1f}",
        line.get("remote"),
        shown or None,
    )
    return ["-" if value is None else _plain(str(value)) for value in values]


def _plain(text: str) -> str:
    """Return text that a terminal shows as it is."""
    return "".join(each if each.isprintable() else "?" for each in text)
