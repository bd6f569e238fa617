"""Read the daemon's audit log: line by line, through rotations, never all of it at once.

Rotated files are those beside it whose names begin with its own, compressed or not; the one that
was written last is the newest.  What is no line of ours, such as one that a crash has cut off, is
passed over and counted.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import time
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from forkd.errors import Forbidden, HostError, InvalidRequest, NotFound
from forkd.sdk._endpoint import state_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "audit.log"

LINE_BYTES_MAX = 8 << 20
"""A line longer than this is not one of ours."""

FOLLOW_INTERVAL_S = 0.2
"""How often it is looked whether there are more lines."""

SANDBOX = "sb-"
"""Begins the ids of sandboxes, of which the beginning is enough."""

AGO = re.compile(r"(\d+)([smhd])")
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

Line = dict[str, Any]


def default_path() -> Path:
    """Return where the daemon of this host keeps its audit log."""
    folder = Path(os.environ.get("FORKD_STATE_DIR") or "/var/lib/forkd")
    if named := os.environ.get("FORKD_AUDIT_LOG"):
        return folder / named
    ups = state_dir() / "store" / NAME  # of the daemon that `forkd up` has started
    return ups if not os.environ.get("FORKD_STATE_DIR") and ups.exists() else folder / NAME


def parse_time(text: str, name: str) -> str:
    """Return a time as lines have it: one that was given in full, or so long ago.

    Raises:
        InvalidRequest: It is neither.
    """
    if found := AGO.fullmatch(text):
        with contextlib.suppress(OverflowError):
            ago = timedelta(**{UNITS[found[2]]: int(found[1])})
            return _written(datetime.now(UTC) - ago)
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            f"--{name} must be a time, such as 2026-11-23T16:40, or how long ago, such as 15m, 2h "
            f"or 3d, not {text!r}",
            field=name,
        ) from None
    return _written(parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed)


def _written(when: datetime) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which lines are wanted; what says nothing wants all.

    Attributes:
        since: The first time.
        until: The time from which on they are not.
        members: Values of members, one of which a line must have.
        objects: One of which it must be about; of a sandbox, the beginning of its id.
    """

    since: str | None = None
    until: str | None = None
    members: dict[str, frozenset[str]] = field(default_factory=dict)
    objects: tuple[str, ...] = ()

    def needles(self) -> list[list[bytes]]:
        """Return bytes of which a line has one of each list, or it is not wanted.

        Looking for them takes a tenth of the time that it takes to parse a line.
        """
        found = [
            [json.dumps(each).encode() for each in values]
            for values in self.members.values()
            if values
        ]
        if self.objects:
            found.append([json.dumps(each)[:-1].encode() for each in self.objects])
        return found

    def has(self, line: Line) -> bool:
        """Whether a line is wanted."""
        at = str(line.get("time"))
        if (self.since is not None and at < self.since) or (
            self.until is not None and at >= self.until
        ):
            return False
        if any(line.get(name) not in values for name, values in self.members.items() if values):
            return False
        return not self.objects or any(map(self._is_wanted, line.get("objects", ())))

    def _is_wanted(self, subject: str) -> bool:
        return any(
            subject == each or (each.startswith(SANDBOX) and subject.startswith(each))
            for each in self.objects
        )


class AuditFile:
    """The audit log of a daemon on this host.

    Attributes:
        skipped: How many lines were none of ours.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.skipped = 0

    def read(self, wanted: Wanted, *, follow: bool = False) -> Iterator[Line]:
        """Yield the lines that are wanted, oldest first; with `follow`, for ever.

        Raises:
            NotFound: There is no such file.
            Forbidden: It is not for us.
            HostError: The kernel refused.
        """
        with _errors(self._path):
            current = self._path.open("rb")
            try:
                for path in self._rotated(wanted.since):
                    yield from self._of_file(path, wanted)
                while True:
                    yield from self._wanted(current, wanted, is_whole=not follow)
                    if not follow:
                        return
                    if self._was_replaced(current):
                        yield from self._wanted(current, wanted)
                        following = self._path.open("rb")
                        current.close()
                        current = following
                    else:
                        time.sleep(FOLLOW_INTERVAL_S)
            finally:
                current.close()

    def _rotated(self, since: str | None) -> list[Path]:
        found = []
        for path in self._path.parent.glob(f"{self._path.name}[.-]*"):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path))
        if since is not None:
            oldest_s = datetime.fromisoformat(since).timestamp()
            found = [each for each in found if each[0] >= oldest_s]
        return [path for _, path in sorted(found)]

    def _of_file(self, path: Path, wanted: Wanted) -> Iterator[Line]:
        opened: Any = gzip.open if path.suffix == ".gz" else Path.open
        try:
            with opened(path, "rb") as file:
                yield from self._wanted(file, wanted)
        except FileNotFoundError:  # rotated once more
            return
        except (EOFError, zlib.error, gzip.BadGzipFile):  # cut off
            self.skipped += 1

    def _was_replaced(self, current: IO[bytes]) -> bool:
        try:
            now = self._path.stat()
        except FileNotFoundError:  # between being renamed and made anew
            return False
        ours = os.fstat(current.fileno())
        if (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino):
            return True
        return now.st_size < current.tell()

    def _wanted(self, file: IO[bytes], wanted: Wanted, *, is_whole: bool = True) -> Iterator[Line]:
        needles = wanted.needles()
        while True:
            at = 0 if is_whole else file.tell()
            raw = file.readline(LINE_BYTES_MAX)
            if not raw:
                return
            if not is_whole and not raw.endswith(b"\n") and len(raw) < LINE_BYTES_MAX:
                file.seek(at)  # the rest of it is being written
                return
            if not all(any(each in raw for each in one_of) for one_of in needles):
                continue
            line = self._parsed(raw)
            if line is not None and wanted.has(line):
                yield line

    def _parsed(self, raw: bytes) -> Line | None:
        try:
            line = json.loads(raw)
        except ValueError:
            line = None
        if isinstance(line, dict) and "time" in line and "action" in line:
            return line
        self.skipped += bool(raw.strip())
        return None


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise NotFound(
            f"there is no audit log {path}; --file names another, and FORKD_AUDIT_LOG says where "
            "the daemon writes it"
        ) from None
    except PermissionError:
        raise Forbidden(f"{path} is for its owner only; run this as root") from None
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}") from error
