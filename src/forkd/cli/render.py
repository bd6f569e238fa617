"""What the command prints: results on standard output, everything else on standard error.

With `--json` a result is one JSON document, and so is an error, on standard error.  Without it a
result is a table, and long steps show how far they are if standard error is a terminal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from forkd.cli import words
from forkd.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import RenderableType
    from rich.progress import Progress

    from forkd.errors import ForkdError

WIDTH_PIPED = 4096
"""Width of a table that no terminal bounds: what reads a pipe wants whole words."""

UNITS_OF_TIME = {"_unix": 1, "_unix_ms": 1_000}
"""How members end that count time from 1970, and how many units they have in a second."""

COLUMNS_UNKNOWN = 80
"""Width of a terminal that does not say, as one on a serial line does not."""

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
    "context": "`forkd context ls` lists contexts",
}
"""How to see what there is, by what was not found: a key of the error's context."""


def document(value: object) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(plain(value), indent=2) + "\n")


def plain(value: object) -> object:
    """Return a result as what JSON can hold, times in both forms."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if hasattr(value, "model_dump"):  # one of the wire's types
        return members(value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


def members(value: Any) -> dict[str, object]:  # noqa: ANN401 - no layer here knows pydantic
    """Return the members of one of the wire's types, times in both forms."""
    dumped = value.model_dump(mode="json")
    return with_dates({name: _member(value, name, each) for name, each in dumped.items()})


def _member(owner: object, name: str, dumped: object) -> object:
    """Return a member of one of the wire's types; what is no such type itself stays as it is."""
    value = getattr(owner, name)
    several = isinstance(value, list) and value and hasattr(value[0], "model_dump")
    return plain(value) if several or hasattr(value, "model_dump") else dumped


def with_dates(members: Mapping[str, object]) -> dict[str, object]:
    """Return members with a time in RFC 3339 behind each that counts from 1970.

    `created_at_unix` is followed by `created_at`, `last_used_unix` by `last_used_at`.
    """
    found: dict[str, object] = {}
    for name, value in members.items():
        found[name] = value
        ending = next((each for each in UNITS_OF_TIME if name.endswith(each)), None)
        if ending is not None:
            about = name.removesuffix(ending)
            dated = about if about == "at" or about.endswith("_at") else f"{about}_at"
            found[dated] = _date(value, UNITS_OF_TIME[ending])
    return found


def _date(value: object, per_second: int) -> str | None:
    if not isinstance(value, int | float):
        return None
    parts = "seconds" if isinstance(value, int) and per_second == 1 else "milliseconds"
    try:
        when = datetime.fromtimestamp(value / per_second, UTC)
    except (OverflowError, ValueError, OSError):
        return None  # of no calendar
    return when.isoformat(timespec=parts).replace("+00:00", "Z")


def printed(drawn: RenderableType) -> None:
    """Print something drawn on standard output; no pipe cuts its lines."""
    from rich.console import Console  # noqa: PLC0415 - few commands draw

    console = Console(highlight=False, width=terminal_width() or WIDTH_PIPED)
    console.print(drawn)


def terminal_width() -> int | None:
    """Return how wide standard output is; None for what is no terminal."""
    if not sys.stdout.isatty():
        return None
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and int(said) > 0:
        return int(said)
    return os.get_terminal_size(sys.stdout.fileno()).columns or COLUMNS_UNKNOWN


def note(text: str) -> None:
    """Say something on standard error; nothing in it can act on a terminal."""
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


def printable(text: str) -> str:
    """Return a text in which nothing can act on a terminal."""
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in text)


def removed(names: Sequence[str], *, as_json: bool) -> None:
    """Print what was removed."""
    if as_json:
        document({"removed": list(names)})
    else:
        for name in names:
            sys.stdout.write(f"{name}\n")


def failure(error: ForkdError, *, as_json: bool, typed: Mapping[str, Any] | None = None) -> None:
    """Say what went wrong and what to do about it.

    Args:
        error: What went wrong.
        as_json: Whether a program reads it.
        typed: Values of the command's options, by their names.
    """
    if as_json:
        members = {**error_members(error), "error": words.said(error, typed)}
        sys.stderr.write(json.dumps(members) + "\n")
        return
    note(f"error: {words.said(error, typed)} ({error.code})")
    more = hint(error)
    if more is not None:
        note(f"hint: {more}")


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

    @property
    def is_live(self) -> bool:
        """Whether there is a bar."""
        return self.bar.live.is_started

    def __call__(self, event: Step) -> None:
        """Show one step."""
        self.shown(event.stage, event.message, event.fraction)

    def say(self, text: str) -> None:
        """Say something in a line of its own, above the bar if there is one."""
        if self.is_live:
            self.bar.console.print(printable(text), markup=False, soft_wrap=True)
        else:
            note(text)


@contextmanager
def steps(*, as_json: bool) -> Iterator[Steps]:
    """Show the steps of a long operation while the context lasts."""
    from rich.console import Console  # noqa: PLC0415 - few commands take long
    from rich.progress import (  # noqa: PLC0415 - as above
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    errors = Console(stderr=True, highlight=False)
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
        yield Steps(bar, _lines())
    else:
        with bar:
            yield Steps(bar, _bars(bar))


def _lines() -> Callable[[str, str, float | None], None]:
    """Return what prints each step once, and no more of a stage that has ended.

    An image that was built here is looked for by the daemon, too, which tells the same stages.
    """
    said: set[tuple[str, str]] = set()
    ended: set[str] = set()

    def show(stage: str, message: str, fraction: float | None) -> None:
        if stage not in ended and (stage, message) not in said:
            said.add((stage, message))
            note(f"{stage:>10}  {message}")
        if fraction == 1:
            ended.add(stage)

    return show


def _bars(bar: Progress) -> Callable[[str, str, float | None], None]:
    """Return what shows a stage as a bar of its own, complete once the next one begins.

    A stage that has ended is shown no second time, as in `_lines`.
    """
    stages: dict[str, Any] = {}
    ended: set[str] = set()

    def show(stage: str, message: str, fraction: float | None) -> None:
        if stage in ended:
            return
        if stage not in stages:
            for task in stages.values():
                bar.update(task, total=1, completed=1)
            stages[stage] = bar.add_task(message, stage=stage, total=None)
        total = None if fraction is None else 1
        bar.update(stages[stage], description=message, total=total, completed=fraction or 0)
        if fraction == 1:
            ended.add(stage)

    return show


def age(unix: int) -> str:
    """Return how long ago a time was, in its largest unit."""
    return _span(int(time.time()) - unix)


def until(unix: int) -> str:
    """Return how long it is until a time, in its largest unit."""
    return _span(unix - int(time.time()))


def _span(seconds: int) -> str:
    seconds = max(0, seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
