"""Programs of ours that do a part of a build in a process of their own, and tell how far they are.

What they write is a line of JSON for each event, as `python -m forkd.images --json` does.  Those
in cells are not believed: a line that is no event is left out.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from forkd.errors import BuildError, CapacityError, ForkdError, InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forkd.images.steps import Build

_KINDS: dict[str, type[ForkdError]] = {
    each.code: each for each in (CapacityError, NotFound, InvalidRequest)
}
"""Errors that are passed on as they are; every other is a `BuildError`."""


def command(*args: str | Path) -> tuple[str | Path, ...]:
    """Return the words that start one of our programs, which writes events."""
    return (sys.executable, "-P", "-m", "forkd.images", *args)


def told(build: Build, start: Callable[[Callable[[str], None]], object]) -> dict[str, Any]:
    """Run a program to its end, pass on what it tells, and return its last event.

    Args:
        build: What it is a part of.
        start: Runs the program, and calls what it is given with each of its lines.

    Raises:
        BuildError: It failed, in its own words if it found any.
        NotFound: Likewise: there is no such image.
        InvalidRequest: Likewise: a setting makes no sense.
        CapacityError: Likewise: there is no room.
    """
    events = _Events(build)
    try:
        start(events.hear)
    except BuildError as error:
        raise events.failed or error from error
    return events.last


class _Events:
    """What a program has told so far."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self.failed: ForkdError | None = None
        self.last: dict[str, Any] = {}

    def hear(self, line: str) -> None:
        match _parsed(line):
            case {"event": "progress", "stage": str(stage), "message": str(message), **rest}:
                fraction = rest.get("fraction")
                known = fraction if isinstance(fraction, float) and 0 <= fraction <= 1 else None
                self._build.tell(stage, _sound(message), known)
            case {"event": "failed", "code": code, "message": str(message)}:
                self.failed = _KINDS.get(str(code), BuildError)(_sound(message))
            case {"event": str()} as event:
                self.last = event


def _sound(text: str) -> str:
    """Return a text that can be sent, whatever is in the names that it shows."""
    return text.encode("utf-8", "backslashreplace").decode()


def _parsed(line: str) -> Any:  # noqa: ANN401 - whatever it is
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
