"""The daemon's log: a line for each event, what it is about behind it.

    2026-11-22 23:30:29,797 WARNING forkd.service.links: snapshot failed tag=s12 error="disk full"

A line that belongs to a request, or to a task that one began, ends with `request=` and the id that
the answer's `X-Request-Id` had.  Values that are not one plain word are quoted as in JSON, so that
nothing a guest or a client has said can look like another field or another line.
"""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING

from forkd.host.faults import kernel_call
from forkd.model.caller import request_id

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)
_OF_EVERY_RECORD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def log_to(file: Path | None) -> None:
    """Send this process's log to the end of a file; None: to standard error."""
    handler = logging.StreamHandler() if file is None else logging.FileHandler(file)
    handler.setFormatter(FieldsFormatter(FORMAT))
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
            root.addHandler(new)
            root.removeHandler(old)
            old.close()


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
