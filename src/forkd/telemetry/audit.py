"""The audit log: one line of JSON for each decision, in a file that only its owner reads.

    {"time": "2026-11-23T16:40:01.123456Z", "request": "9f…", "principal": "token:ci",
     "tenant": "default", "remote": "10.0.0.7:50112", "action": "fork", "objects": ["warm", "sb-…"],
     "result": "ok", "error": null, "status": 201, "latency_ms": 12.3}

A line is handed to a thread of its own, so that a slow disk keeps nobody waiting, and is in the
file a moment later.  What cannot be written waits, in so much memory and no more, and is tried
again; what finds no room there is counted, and a line says how many were lost as soon as lines can
be written again.  `AuditLog.check` is for those who would rather not go on without a record.

The file is only ever appended to.  A line that was cut off, by a crash or a full disk, is ended
before the next one begins.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from forkd.errors import CapacityError, ForkdError, InvalidRequest
from forkd.host.appending import AppendedFile

if TYPE_CHECKING:
    from pathlib import Path

QUEUE_BYTES_MAX = 16 << 20
"""Lines that wait to be written; what comes beyond is lost, and counted."""

BATCH_LINES_MAX = 1_024
"""Most lines that are written at once."""

RETRY_S = 1.0
"""How often it is tried again to write what could not be written."""

END_TIMEOUT_S = 10.0
"""Time that the last lines have, when the daemon ends."""

RETRY_AFTER_S = 5
"""When a client should ask again that was refused because nothing can be recorded."""

MODE = 0o600
OTHERS = 0o077
"""Permission bits of everybody but a file's owner."""

LOST = "audit_lost"
"""Action of the line that counts lines that were lost."""

log = logging.getLogger(__name__)

WhenFull = Literal["continue", "refuse"]


class Result(StrEnum):
    """How a request ended."""

    OK = "ok"
    DENIED = "denied"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision.

    Attributes:
        action: The operation, never anything that a client has chosen.
        result: How it ended.
        request: Id of the request.
        principal: Who asked; None if nobody knows.
        tenant: On whose behalf.
        remote: Where from: `address:port`, or `unix:uid=…,pid=…`.
        objects: Ids of what was touched or made.
        error: Code of the error.
        status: Of HTTP.
        latency_ms: From the request to the end of its answer.
    """

    action: str
    result: Result
    request: str | None = None
    principal: str | None = None
    tenant: str | None = None
    remote: str | None = None
    objects: tuple[str, ...] = ()
    error: str | None = None
    status: int | None = None
    latency_ms: float | None = None


class AuditLog:
    """A file of lines, and the thread that writes them.

    Args:
        path: The file; made if it is missing.
        when_full: Whether `check` refuses while lines cannot be written.

    Attributes:
        path: The file.
        lost: How many lines were lost since the start.

    Raises:
        InvalidRequest: Others may read the file, or it is none.
        HostError: The kernel refused.
    """

    def __init__(self, path: Path, when_full: WhenFull = "continue") -> None:
        self.path = path
        self.lost = 0
        self._refuses = when_full == "refuse"
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._cut = 0  # bytes of the first line that are in the file already
        self._unreported = 0
        self._problem: ForkdError | None = None
        self._ending = False
        self._next_file: AppendedFile | None = None
        self._file = _opened(path)
        self._take_file()
        self._thread = threading.Thread(target=self._run, name="forkd-audit", daemon=True)
        self._thread.start()

    def note(self, entry: Entry) -> None:
        """Have a line written; returns at once."""
        line = _line(asdict(entry))
        with self._changed:
            if self._ending or self._bytes + len(line) > QUEUE_BYTES_MAX:
                self.lost += 1
                self._unreported += 1
                return
            self._add(line)
            self._changed.notify()

    def check(self) -> None:
        """Return if what is done now will be recorded, or need not be.

        Raises:
            CapacityError: Lines cannot be written, and the operator wants no more done then.
        """
        if not self._refuses:
            return
        problem = self._problem
        if problem is not None or self._bytes > QUEUE_BYTES_MAX // 2:
            reason = "its disk is too slow" if problem is None else str(problem)
            raise CapacityError(
                f"the audit log cannot be written ({reason}), and FORKD_AUDIT_FULL is `refuse`: "
                "until it can, only reads are served",
                retry_after_s=RETRY_AFTER_S,
            )

    def reopen(self) -> None:
        """Go on in the file that has the name now: the old one was renamed.

        Raises:
            InvalidRequest: As for a new log; the old file stays in use.
            HostError: The kernel refused; the old file stays in use.
        """
        opened = _opened(self.path)
        with self._changed:
            if self._next_file is not None:
                self._next_file.close()
            self._next_file = opened
            self._changed.notify()

    def close(self) -> None:
        """Write what is left, if that can be done; idempotent."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(END_TIMEOUT_S)
        if self._thread.is_alive() or self._lines:
            log.error("audit lines lost at the end", extra={"lines": len(self._lines)})

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        self._bytes += len(line)

    def _run(self) -> None:
        while self._wait():
            with self._changed:
                if self._next_file is not None:
                    self._file.close()
                    self._file, self._next_file = self._next_file, None
                    self._take_file()
                batch = [self._lines[at] for at in range(min(len(self._lines), BATCH_LINES_MAX))]
            written, problem = self._file.write(b"".join(batch)[self._cut :])
            with self._changed:
                self._remove(self._cut + written)
                self._note_problem(problem)
                if problem is not None and self._ending:
                    break
        self._file.close()
        if self._next_file is not None:
            self._next_file.close()

    def _wait(self) -> bool:
        """Wait for something to do; returns False at the end."""
        with self._changed:
            if self._problem is not None:
                self._changed.wait_for(lambda: self._ending or self._next_file, RETRY_S)
                return True
            self._changed.wait_for(lambda: self._lines or self._next_file or self._ending)
            return bool(self._lines or self._next_file)

    def _take_file(self) -> None:
        """Begin a new line in a file that ends within one."""
        if self._cut:
            self._cut = 0  # all of it again
        if self._file.ends_within_a_line():
            self._lines.appendleft(b"\n")
            self._bytes += 1

    def _remove(self, written: int) -> None:
        """Remove lines of which so many bytes are in the file, and note what is of the next."""
        while self._lines and len(self._lines[0]) <= written:
            line = self._lines.popleft()
            written -= len(line)
            self._bytes -= len(line)
        self._cut = written

    def _note_problem(self, problem: ForkdError | None) -> None:
        if problem is None and self._unreported:
            lost = asdict(Entry(LOST, Result.FAILED, principal="forkd"))
            self._add(_line({**lost, "lost": self._unreported}))
            self._unreported = 0
        if (problem is None) != (self._problem is None):
            extra = {"file": str(self.path)}
            if problem is None:
                log.warning("audit log is written again", extra={**extra, "lost": self.lost})
            else:
                log.error("audit log cannot be written", extra={**extra, "error": str(problem)})
        self._problem = problem


def _line(members: dict[str, object]) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"
    return json.dumps({"time": now, **members}, separators=(",", ":")).encode() + b"\n"


def _opened(path: Path) -> AppendedFile:
    """Open a file for appending, which is for its owner only."""
    opened = AppendedFile.open(path, MODE)
    try:
        _check(path, opened.permissions)
    except BaseException:
        opened.close()
        raise
    return opened


def _check(path: Path, permissions: int | None) -> None:
    if permissions is None:
        raise _unusable(path, "is no file. Name one, or set FORKD_AUDIT_LOG to nothing")
    if permissions & OTHERS:
        said = f"may be read by others (mode {permissions:04o}); run: chmod 600 {path}"
        raise _unusable(path, said)


def _unusable(path: Path, problem: str) -> InvalidRequest:
    return InvalidRequest(f"audit log {path} {problem}", field="audit_log")
