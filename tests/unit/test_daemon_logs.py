"""A line of the daemon's log says whom it is about."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from forkd.daemon.logs import (
    FORMAT,
    LINES_BURST_MAX,
    LINES_PER_S_MAX,
    MESSAGES_COUNTED_MAX,
    FieldsFormatter,
    RateFilter,
    log_to,
    reopen,
)
from forkd.model.caller import Request, current_request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """The log of this process, which has another again afterwards."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        log_to(tmp_path / "log")
        yield tmp_path / "log"
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:], root.level = before, level


def test_fields_follow_the_message_in_their_order(file: Path) -> None:
    extra = {"sandbox": "sb-1", "ended": 2, "error": "no space left"}

    logging.getLogger("forkd.service.owner").warning("sandbox exited", extra=extra)

    end = (
        ' WARNING forkd.service.owner: sandbox exited sandbox=sb-1 ended=2 error="no space left"\n'
    )
    assert file.read_text().endswith(end)


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("/run/forkd/a.sock", "/run/forkd/a.sock"),
        ("", '""'),
        ("said\n2026-11-22 INFO forkd: hello", '"said\\n2026-11-22 INFO forkd: hello"'),
        ("a sandbox=sb-2", '"a sandbox=sb-2"'),
        ('"', '"\\""'),
        ("\x1b[31m", '"\\u001b[31m"'),
        (None, "None"),
    ],
)
def test_what_somebody_said_is_neither_a_line_nor_a_field_of_its_own(
    value: object, quoted: str
) -> None:
    record = logging.makeLogRecord({"msg": "snapshot failed", "error": value})

    assert FieldsFormatter("%(message)s").format(record) == f"snapshot failed error={quoted}"


def test_a_traceback_comes_after_the_fields() -> None:
    info = (ValueError, ValueError("bad"), None)
    record = logging.makeLogRecord({"msg": "failed", "tag": "base", "exc_info": info})

    first, second = FieldsFormatter(FORMAT).format(record).splitlines()

    assert first.endswith(": failed tag=base")
    assert second == "ValueError: bad"


def test_a_line_of_a_request_ends_with_its_id(file: Path) -> None:
    token = current_request.set(Request("0123abcd"))
    logging.getLogger("forkd").warning("within", extra={"sandbox": "sb-1"})
    current_request.reset(token)
    logging.getLogger("forkd").warning("after")

    within, after = file.read_text().splitlines()
    assert within.endswith(" within sandbox=sb-1 request=0123abcd")
    assert after.endswith(" after")


def test_lines_of_one_message_are_limited_and_the_next_says_how_many_were_left_out() -> None:
    now_s = 0.0
    limited = RateFilter(lambda: now_s)

    def written(message: str, count: int) -> list[logging.LogRecord]:
        records = [logging.makeLogRecord({"name": "forkd", "msg": message}) for _ in range(count)]
        return [each for each in records if limited.filter(each)]

    assert len(written("connection refused", 10_000)) == LINES_BURST_MAX
    assert len(written("sandbox exited", 2)) == 2
    now_s += 2.0
    first, *others = written("connection refused", 10_000)
    assert len(others) == 2 * LINES_PER_S_MAX - 1
    line = FieldsFormatter("%(message)s").format(first)
    assert line == f"connection refused left_out={10_000 - LINES_BURST_MAX}"
    assert "left_out" not in vars(others[0])


def test_messages_are_counted_within_a_limit() -> None:
    limited = RateFilter()
    for number in range(3 * MESSAGES_COUNTED_MAX):
        assert limited.filter(logging.makeLogRecord({"name": "lib", "msg": f"{number} happened"}))
    assert len(limited._lines) <= MESSAGES_COUNTED_MAX  # noqa: SLF001


def test_a_log_that_is_opened_anew_is_limited_as_before(file: Path) -> None:
    log = logging.getLogger("forkd.daemon.connections")
    for _ in range(LINES_BURST_MAX):
        log.warning("connection refused")
    file.rename(file.with_suffix(".1"))
    reopen()
    for _ in range(LINES_BURST_MAX):
        log.warning("connection refused")

    assert len(file.read_text().splitlines()) < LINES_BURST_MAX / 2
