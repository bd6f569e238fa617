"""`forkd top`: what sandboxes use, live."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from forkd.cli import render, tables
from forkd.cli.context import shared
from forkd.cli.options import Json, NoTrunc
from forkd.cli.tables import Column, short_ids
from forkd.cli.units import counted, shown_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from forkd import Client
    from forkd.cli.help_text import Commands
    from forkd.wire.v2_events import UsageInfo

INTERVAL_S = 2.0
"""How often it is asked again."""

FIRST_INTERVAL_S = 1.1
"""From the first measurement to the second, before which there is no CPU share: the daemon measures
once a second."""

LOOK_S = 0.1
"""How soon a key, or another size of the terminal, is noticed."""

SPACE = "   "
"""What is between two sums."""

LINES_AROUND = 3
"""Lines of the terminal that are no sandbox's: totals, the head of the table, and the last one."""

COLUMNS: tuple[Column[Any], ...] = tuple(
    Column(title, str, short=title == "ID", right=right, minor=minor)
    for title, right, minor in (
        ("ID", False, False),
        ("SNAPSHOT", False, False),
        ("CPU %", True, False),
        ("MEMORY", True, False),
        ("DISK", True, True),
        ("CPU TIME", True, True),
        ("AGE", True, True),
        ("RECEIVED", True, True),
        ("SENT", True, True),
    )
)


Key = Literal["cpu", "time", "memory", "disk", "network", "age", "id"]
"""What it can be sorted by."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sandbox, and what share of one CPU it has had; None before its second measurement."""

    usage: UsageInfo
    cpu_percent: float | None

    def rank(self, key: Key) -> tuple[float | str, ...]:
        """Return what sorts it, the first of all least."""
        of = self.usage
        network = (of.network_received_bytes or 0) + (of.network_sent_bytes or 0)
        ranks: dict[Key, float] = {
            "cpu": -(self.cpu_percent or 0.0),
            "time": -of.cpu_secs,
            "memory": -of.memory_private_bytes,
            "disk": -of.disk_bytes,
            "network": -network,
            "age": of.created_at_unix,
            "id": 0,
        }
        return ranks[key], of.id

    def cells(self) -> Iterator[str]:
        """Yield what is shown of it, by `COLUMNS`."""
        of = self.usage
        yield of.id
        yield of.snapshot_tag
        yield "-" if self.cpu_percent is None else f"{self.cpu_percent:.1f}"
        yield ("" if of.memory_private_exact else "≤ ") + _size(of.memory_private_bytes)
        yield _size(of.disk_bytes)
        yield _duration(of.cpu_secs)
        yield render.age(of.created_at_unix)
        yield _size(of.network_received_bytes)
        yield _size(of.network_sent_bytes)


class Sampler:
    """Asks the daemon, and remembers what it said last: CPU time becomes a share."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._rows: dict[str, Row] = {}

    def rows(self) -> list[Row]:
        """Return every running sandbox."""
        self._rows = {each.id: self._row(each) for each in self._client.usage()}
        return list(self._rows.values())

    def _row(self, now: UsageInfo) -> Row:
        before = self._rows.get(now.id)
        if before is None:
            return Row(now, None)
        took_s = now.measured_at_unix - before.usage.measured_at_unix
        if took_s <= 0:  # the daemon has not measured again, or its clock was set
            return Row(now, before.cpu_percent)
        # A promotion or a restart may have put another machine behind the id.
        return Row(now, max(0.0, now.cpu_secs - before.usage.cpu_secs) / took_s * 100)


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.command()(top)


def top(
    *,
    sort: Annotated[Key, typer.Option(help="Column to sort by, greatest first.")] = "cpu",
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    no_trunc: NoTrunc = False,
    json: Json = False,
) -> None:
    """Show live resource use of running sandboxes (q quits).

    Figures are measured again every two seconds.  Without a terminal, and with --once or --json,
    they are shown once.  A figure marked ≤ is an upper bound.

    Examples:
      forkd top
      forkd top --sort memory
      forkd top --once --json
    """
    console = Console(highlight=False)
    with shared.client(as_json=json) as client:
        sampler = Sampler(client)
        if not (once or json) and console.is_terminal:
            _watch(console, sampler, sort, whole_ids=no_trunc)
            return
        sampler.rows()
        time.sleep(FIRST_INTERVAL_S)
        rows = _sorted(sampler.rows(), sort)
    if json:
        render.document([_members(each) for each in rows])
    else:
        width = render.terminal_width()
        render.printed(_drawn(rows, width, whole_ids=no_trunc or width is None))


def _members(row: Row) -> dict[str, object]:
    return {**render.members(row.usage), "cpu_percent": row.cpu_percent}


def _watch(console: Console, sampler: Sampler, sort: Key, *, whole_ids: bool) -> None:
    """Show a table until somebody ends it."""
    rows = _sorted(sampler.rows(), sort)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        due_s = time.monotonic() + FIRST_INTERVAL_S
        size = None
        while True:
            if console.size != size:
                size = console.size
                drawn = _drawn(rows, size.width, whole_ids=whole_ids, height=size.height)
                live.update(drawn, refresh=True)
            if pressed(LOOK_S) == "q":
                return
            if time.monotonic() >= due_s:
                rows = _sorted(sampler.rows(), sort)
                due_s = time.monotonic() + INTERVAL_S
                size = None


@contextlib.contextmanager
def _keys() -> Iterator[Pressed]:
    """Read keys as they are pressed, without showing them, if standard input is a terminal."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        yield Pressed(None)
        return
    import termios  # noqa: PLC0415 - Unix's alone, and only a terminal needs it
    import tty  # noqa: PLC0415 - as above

    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield Pressed(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@dataclass(frozen=True, slots=True)
class Pressed:
    """Waits for keys."""

    descriptor: int | None

    def __call__(self, timeout_s: float) -> str | None:
        """Return the key that is pressed within a time; `q` if none can be any more."""
        if self.descriptor is None:
            time.sleep(timeout_s)
            return None
        ready, _, _ = select.select([self.descriptor], [], [], timeout_s)
        return (os.read(self.descriptor, 1).decode("latin-1") or "q") if ready else None


def _sorted(rows: Sequence[Row], key: Key) -> list[Row]:
    return sorted(rows, key=lambda row: row.rank(key))


def _drawn(
    rows: Sequence[Row], width: int | None, *, whole_ids: bool, height: int | None = None
) -> RenderableType:
    """Draw totals and a row for each sandbox, as many as there is room for."""
    room = None if height is None else max(0, height - LINES_AROUND)
    ids = short_ids(row.usage.id for row in rows)
    cells = [[*row.cells()] for row in rows[:room]]
    if not whole_ids:
        cells = [[ids[first], *rest] for first, *rest in cells]
    lines = tables.drawn(COLUMNS, cells, width)
    head = Text(lines[0], style="bold", no_wrap=True)
    body = [Text(line, no_wrap=True, overflow="ignore") for line in lines[1:][:room]]
    return Group(Text(_totals(rows, width), no_wrap=True), head, *body)


def _totals(rows: Sequence[Row], width: int | None) -> str:
    """Return sums, as many as there is room for."""
    of = [row.usage for row in rows]
    sums = [
        f"{datetime.now(UTC).astimezone():%H:%M:%S}",
        counted(len(rows), "sandbox", "sandboxes"),
        f"cpu {sum(row.cpu_percent or 0.0 for row in rows):.1f} %",
        f"memory {_size(sum(each.memory_private_bytes for each in of))}",
        f"disk {_size(sum(each.disk_bytes for each in of))}",
        f"received {_size(sum(each.network_received_bytes or 0 for each in of))}",
        f"sent {_size(sum(each.network_sent_bytes or 0 for each in of))}",
    ]
    while width is not None and len(sums) > 1 and len(SPACE.join(sums)) > width:
        sums.pop()
    return SPACE.join(sums)


def _size(count: int | None) -> str:
    return "-" if count is None else shown_size(count)


def _duration(time_s: float) -> str:
    minutes, seconds = divmod(time_s, 60)
    return f"{int(minutes)}:{seconds:05.2f}"
