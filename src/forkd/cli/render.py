"""What the command prints: results on standard output, everything else on standard error.

With `--json` a result is one JSON document, and so is an error, on standard error.  Without it a
result is a table, and long steps show how far they are if standard error is a terminal.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from forkd.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

    from forkd.errors import ForkdError

WIDTH_PIPED = 4096
"""Width of a table that no terminal bounds: what reads a pipe wants whole words."""

WRAPPED_MIN = 29
"""Width of a wrapped column in the narrowest terminal: an id."""

HINTS = {
    "denied": "pass --token, or set FORKD_TOKEN",
    "capacity": "the same command may work later",
    "busy": "the same command may work later",
    "host": "`forkd doctor` checks what this host can do",
}
"""What to do about an error, by its code, where its message does not say so itself."""

NOT_FOUND_HINTS = {
    "sandbox": "`forkd ls` lists sandboxes",
    "tag": "`forkd snapshot ls` lists snapshots",
}
"""How to see what there is, by what was not found: a key of the error's context."""

errors = Console(stderr=True, highlight=False)


def document(value: object) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(_plain(value), indent=2) + "\n")


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, wrapped: str | None = None
) -> None:
    """Print a table; a value that is absent is a dash.

    Args:
        columns: Their names.
        rows: A cell for each column.
        wrapped: The column that has further lines where a terminal is too narrow; None for none.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        if column == wrapped:
            made.add_column(column.upper(), min_width=WRAPPED_MIN)
        else:
            made.add_column(column.upper(), no_wrap=True, overflow="ignore")
    for row in rows:
        made.add_row(*("-" if cell is None else str(cell) for cell in row))
    printed(made)


def printed(drawn: RenderableType) -> None:
    """Print something drawn on standard output; no pipe cuts its lines."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_PIPED
    console.print(drawn)


def note(text: str) -> None:
    """Say something to whoever watches."""
    errors.print(text, markup=False, soft_wrap=True)


def failure(error: ForkdError, *, as_json: bool) -> None:
    """Say what went wrong and what to do about it."""
    if as_json:
        sys.stderr.write(json.dumps(error_members(error)) + "\n")
        return
    errors.print(f"error: {error} ({error.code})", markup=False, soft_wrap=True)
    said = hint(error)
    if said is not None:
        errors.print(f"hint: {said}", markup=False, soft_wrap=True)


def error_members(error: ForkdError) -> dict[str, Any]:
    """Return an error as members of a JSON object."""
    return {"error": str(error), "code": error.code, "context": error.context}


def hint(error: ForkdError) -> str | None:
    """Return what to do about an error; None if there is no more to say than it says."""
    if isinstance(error, NotFound):
        return next((NOT_FOUND_HINTS[key] for key in error.context if key in NOT_FOUND_HINTS), None)
    return HINTS.get(error.code)


class Step(Protocol):
    """One step of a long operation, the daemon's or our own."""

    @property
    def stage(self) -> str:
        """What it belongs to."""
        ...

    @property
    def message(self) -> str:
        """What is being done, in a sentence."""
        ...

    @property
    def fraction(self) -> float | None:
        """How much of the stage is done, 0.0 to 1.0; None if nobody knows."""
        ...


@dataclass
class Steps:
    """A long operation's steps: a bar on a terminal, lines elsewhere, nothing with `--json`."""

    bar: Progress
    shown: Callable[[str, str, float | None], None]

    def __call__(self, event: Step) -> None:
        """Show one step."""
        self.shown(event.stage, event.message, event.fraction)


@contextmanager
def steps(*, as_json: bool) -> Iterator[Steps]:
    """Show the steps of a long operation while the context lasts."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.fields[stage]:>10}", style="bold"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=errors,
        disable=as_json or not errors.is_terminal,
    )
    if as_json:
        yield Steps(bar, lambda *_: None)
    elif not errors.is_terminal:
        yield Steps(bar, _line)
    else:
        with bar:
            yield Steps(bar, _bars(bar))


def _line(stage: str, message: str, _: float | None) -> None:
    note(f"{stage:>10}  {message}")


def _bars(bar: Progress) -> Callable[[str, str, float | None], None]:
    """Return what shows a stage as a bar of its own, complete once the next one begins."""
    open_stages: list[tuple[str, Any]] = []

    def show(stage: str, message: str, fraction: float | None) -> None:
        if not open_stages or open_stages[-1][0] != stage:
            if open_stages:
                bar.update(open_stages[-1][1], total=1, completed=1)
            open_stages.append((stage, bar.add_task(message, stage=stage, total=None)))
        total = None if fraction is None else 1
        bar.update(open_stages[-1][1], description=message, total=total, completed=fraction or 0)

    return show


def age(unix: int) -> str:
    """Return how long ago a time was, in its largest unit."""
    return _span(int(datetime.now(UTC).timestamp()) - unix)


def until(unix: int) -> str:
    """Return how long it is until a time, in its largest unit."""
    return _span(unix - int(datetime.now(UTC).timestamp()))


def _span(seconds: int) -> str:
    seconds = max(0, seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def mib(size_bytes: int) -> str:
    """Return a size in MiB."""
    return f"{size_bytes / (1 << 20):.0f} MiB"
