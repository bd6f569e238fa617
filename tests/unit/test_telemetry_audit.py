"""The audit log is a file of lines, whatever its disk does, and for its owner only."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from forkd.errors import CapacityError, InvalidRequest
from forkd.telemetry import audit
from forkd.telemetry.audit import AuditLog, Entry, Result, WhenFull
from tests.support.audited import lines_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DEADLINE_S = 10.0


def entry(action: str = "fork") -> Entry:
    return Entry(action, Result.OK, request="1", principal="token:ci")


class Disk:
    """Writes as much as there is room; then nothing, until there is more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self.refused = threading.Event()
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.room_bytes:
            self.refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        done = self._write(descriptor, data[: self.room_bytes])
        self.room_bytes -= done
        return done


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "RETRY_S", 0.001)


@contextlib.contextmanager
def opened(path: Path, when_full: WhenFull = "continue") -> Iterator[AuditLog]:
    with contextlib.closing(AuditLog(path, when_full)) as log:
        yield log


def test_a_line_is_json_with_a_time_to_the_microsecond_and_all_members(path: Path) -> None:
    before = datetime.now(UTC)
    with opened(path) as log:
        log.note(
            Entry("fork", Result.OK, "1", "token:ci", "red", "[::1]:5", ("a", "b"), None, 201, 1.5)
        )

    (line,) = lines_of(path)
    at = line.pop("time")
    assert datetime.strptime(at, "%Y-%m-%dT%H:%M:%S.%f%z") - before < timedelta(minutes=1)
    assert len(at) == len("2026-11-23T16:40:01.123456Z")
    assert line == {
        "action": "fork", "result": "ok", "request": "1", "principal": "token:ci", "tenant": "red",
        "remote": "[::1]:5", "objects": ["a", "b"], "error": None, "status": 201, "latency_ms": 1.5,
    }  # fmt: skip


def test_the_file_is_for_its_owner_only_and_is_appended_to(path: Path) -> None:
    for action in ("first", "second"):
        with opened(path) as log:
            log.note(entry(action))

    assert path.stat().st_mode & 0o777 == 0o600
    assert [each["action"] for each in lines_of(path)] == ["first", "second"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602, 0o610])
def test_a_file_that_others_may_open_is_refused_with_the_way_out(path: Path, mode: int) -> None:
    path.touch()
    path.chmod(mode)

    with pytest.raises(InvalidRequest, match=f"chmod 600 {path}") as caught:
        AuditLog(path)
    assert caught.value.context["field"] == "audit_log"


def test_what_is_no_file_is_refused_and_nobody_waits_for_it(path: Path) -> None:
    os.mkfifo(path, 0o600)

    with pytest.raises(InvalidRequest, match="no file"):
        AuditLog(path)


def test_a_line_that_a_crash_has_cut_off_does_not_spoil_the_next(path: Path) -> None:
    path.touch(0o600)
    path.write_text('{"time": "2026-')

    with opened(path) as log:
        log.note(entry())

    cut, line = path.read_text().splitlines()
    assert cut == '{"time": "2026-'
    assert json.loads(line)["action"] == "fork"


def test_after_a_rotation_lines_go_to_the_new_file(path: Path) -> None:
    with opened(path) as log:
        log.note(entry("before"))
        log.close()
    with opened(path) as log:
        path.rename(path.with_suffix(".1"))
        log.reopen()
        log.note(entry("after"))

    assert [each["action"] for each in lines_of(path.with_suffix(".1"))] == ["before"]
    assert [each["action"] for each in lines_of(path)] == ["after"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_new_file_that_others_may_read_leaves_the_old_one_in_use(path: Path) -> None:
    with opened(path) as log:
        path.rename(path.with_suffix(".1"))
        path.touch()
        path.chmod(0o644)

        with pytest.raises(InvalidRequest, match="chmod 600"):
            log.reopen()
        log.note(entry())

    assert len(lines_of(path.with_suffix(".1"))) == 1
    assert path.read_text() == ""


@pytest.mark.usefixtures("soon")
def test_what_a_full_disk_has_no_room_for_is_written_whole_when_there_is_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, room_bytes=100)  # less than a line
    with opened(path) as log:
        for number in range(50):
            log.note(entry(str(number)))
        assert disk.refused.wait(DEADLINE_S)
        disk.room_bytes = 1 << 20

    assert [each["action"] for each in lines_of(path)] == [str(each) for each in range(50)]


@pytest.mark.usefixtures("soon")
def test_a_line_that_a_full_disk_has_cut_off_is_whole_in_the_file_after_a_rotation(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, room_bytes=100)
    with opened(path) as log:
        log.note(entry())
        assert disk.refused.wait(DEADLINE_S)
        path.rename(path.with_suffix(".1"))
        log.reopen()
        disk.room_bytes = 1 << 20

    assert len(path.with_suffix(".1").read_bytes()) == 100
    assert [each["action"] for each in lines_of(path)] == ["fork"]


@pytest.mark.usefixtures("soon")
def test_what_finds_no_room_in_memory_is_counted_in_a_line_of_its_own(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "QUEUE_BYTES_MAX", 2_000)
    disk = Disk(monkeypatch, room_bytes=0)
    with opened(path) as log:
        for number in range(100):
            log.note(entry(str(number)))
        assert disk.refused.wait(DEADLINE_S)
        lost = log.lost
        log.check()  # goes on
        disk.room_bytes = 1 << 20

    *lines, last = lines_of(path)
    assert [each["action"] for each in lines] == [str(each) for each in range(100 - lost)]
    assert 0 < lost < 100
    assert (last["action"], last["result"], last["lost"]) == ("audit_lost", "failed", lost)


@pytest.mark.usefixtures("soon")
def test_who_would_rather_not_go_on_is_told_until_there_is_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, room_bytes=0)
    with opened(path, when_full="refuse") as log:
        log.check()
        log.note(entry())
        until(lambda: refuses(log))
        with pytest.raises(CapacityError, match=r"No space left.*FORKD_AUDIT_FULL"):
            log.check()

        disk.room_bytes = 1 << 20
        until(lambda: not refuses(log))

    assert len(lines_of(path)) == 1


def test_a_disk_that_is_too_slow_is_as_good_as_full(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "QUEUE_BYTES_MAX", 2_000)
    go, write = threading.Event(), os.write

    def slowly(descriptor: int, data: bytes) -> int:
        go.wait(DEADLINE_S)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", slowly)
    with opened(path, when_full="refuse") as log:
        for _ in range(8):
            log.note(entry())
        with pytest.raises(CapacityError, match="too slow") as caught:
            log.check()
        go.set()
    assert caught.value.context["retry_after_s"] == audit.RETRY_AFTER_S


def refuses(log: AuditLog) -> bool:
    try:
        log.check()
    except CapacityError:
        return True
    return False


def until(condition: Callable[[], bool]) -> None:
    passed = threading.Event()
    for _ in range(10_000):
        if condition():
            return
        passed.wait(0.001)
    raise AssertionError("it never came to that")
