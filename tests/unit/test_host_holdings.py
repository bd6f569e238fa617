"""What processes hold is read within a time, and what was not read is made up for the next time."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from forkd.host import holdings, proc
from forkd.host.holdings import Holding, Holdings

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NOBODY = 1 << 22
"""More than any process id."""


def test_memory_is_what_the_kernel_says_and_a_process_that_is_gone_holds_nothing(
    tmp_path: Path,
) -> None:
    found = Holdings(tmp_path).read([os.getpid(), NOBODY], within_s=60.0)

    assert found.keys() == {os.getpid()}
    held = found[os.getpid()]
    assert 0 < held.private_bytes <= held.proportional_bytes
    assert held.private_bytes <= proc.anonymous_bytes(os.getpid()) + held.proportional_bytes


def test_files_without_names_count_and_others_do_not(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.write(descriptor, bytes(1 << 20))
        with (tmp_path / "named").open("wb") as named:
            named.write(bytes(1 << 20))
            named.flush()
            held = Holdings(tmp_path).read([os.getpid()], within_s=60.0)[os.getpid()]
            taken = os.fstat(descriptor)
        assert held.nameless[taken.st_dev, taken.st_ino] == taken.st_blocks * 512 >= 1 << 20
        assert sum(held.nameless.values()) < 2 << 20
    finally:
        os.close(descriptor)


def test_what_there_is_no_time_for_is_read_first_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    read: list[int] = []

    def slow(pid: int, _: int) -> Holding:
        clock[0] += 1.0
        read.append(pid)
        return Holding(pid, pid)

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(holdings, "_holding", slow)
    monkeypatch.setattr(proc, "anonymous_bytes", lambda pid: 1_000 + pid)
    reader = Holdings(tmp_path)
    pids = [1, 2, 3, 4]

    first = reader.read(pids, within_s=2.0)
    assert len(read) == 2
    assert {pid: each.private_bytes for pid, each in first.items()} == {
        pid: pid if pid in read else 1_000 + pid for pid in pids
    }
    reader.read(pids, within_s=2.0)
    assert sorted(read) == pids
    third = reader.read([*pids, 5], within_s=1.0)
    assert read[-1] == 5
    assert {pid: each.private_bytes for pid, each in third.items()} == {p: p for p in [*pids, 5]}
