"""The daemon's log: a line for each event, what it is about behind it.

    2026-11-22 23:30:29,797 WARNING forkd.service.links: snapshot failed tag=s12 error="disk full"

A line that belongs to a request, or to a task that one began, ends with `request=` and the id that
the answer's `X-Request-Id` had.  Values that are not one plain word are quoted as in JSON, so that
nothing a guest or a client has said can look like another field or another line.

Lines of one message are limited, since guests and strangers cause some: `left_out=` says how many
of it were not written before this one.
"""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.host.faults import kernel_call
from forkd.model.caller import request_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

LINES_PER_S_MAX = 5
"""Most lines of one message in a second, over time."""

LINES_BURST_MAX = 500
"""Most lines of one message at once, after there were none for a while."""

MESSAGES_COUNTED_MAX = 1_024
"""Messages whose lines are counted before all counts begin anew; the code has fewer."""

_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)
_OF_EVERY_RECORD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def log_to(file: Path | None) -> None:
    """Send this process's log to the end of a file; None: to standard error."""
    handler = logging.StreamHandler() if file is None else logging.FileHandler(file)
    handler.setFormatter(FieldsFormatter(FORMAT))
    handler.addFilter(RateFilter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def reopen() -> None:
    """Go on in the file that has the log's name now, if the log is a file.

    Raises:
        HostError: It cannot be opened; the old one stays in use.
    """
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old, logging.FileHandler):
            with kernel_call(f"open the log {old.baseFilename}"):
                new = logging.FileHandler(old.baseFilename)
            new.setFormatter(old.formatter)
            for each in old.filters:
                new.addFilter(each)
            root.addHandler(new)
            root.removeHandler(old)
            old.close()


@dataclass(slots=True)
class _Lines:
    """The lines of one message: how many may be written at once, since when, and how many were not.

    Attributes:
        room: How many more may be written at `at_s`.
        at_s: When that was counted.
        left_out: How many were not written since the last that was.
    """

    room: float
    at_s: float
    left_out: int = 0


class RateFilter(logging.Filter):
    """Leaves lines out of which there are too many; the next one says how many.

    Args:
        clock: Tells monotonic time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lines: dict[tuple[str, str], _Lines] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        now, key = self._clock(), (record.name, str(record.msg))
        if key not in self._lines and len(self._lines) >= MESSAGES_COUNTED_MAX:
            self._lines.clear()
        lines = self._lines.setdefault(key, _Lines(LINES_BURST_MAX, now))
        passed_s, lines.at_s = now - lines.at_s, now
        lines.room = min(lines.room + passed_s * LINES_PER_S_MAX, LINES_BURST_MAX)
        if lines.room < 1:
            lines.left_out += 1
            return False
        lines.room -= 1
        if lines.left_out:
            record.left_out, lines.left_out = lines.left_out, 0
        return True


class FieldsFormatter(logging.Formatter):
    """Puts what was given as `extra` behind the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line without a traceback; one line, whatever the fields hold."""
        words = (
            f"{name}={_quoted(value)}"
            for name, value in record.__dict__.items()
            if name not in _OF_EVERY_RECORD
        )
        request = request_id()
        ending = [] if request is None else [f"request={request}"]
        return " ".join([super().formatMessage(record), *words, *ending])


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
