"""What the kernel says of pressure and of memory is read from the line that is meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
from forkd.host import cgroupfs, proc

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LINES = """some avg10={} avg60=90.00 avg300=91.00 total=9
full avg10={} avg60=92.00 avg300=93.00 total=8
"""

MEASURES = [
    (proc.memory_pressure, "memory", 2.0),
    (proc.io_pressure, "io", 4.0),
    (proc.cpu_pressure, "cpu", 5.0),
]


@pytest.fixture
def pressure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder like /proc/pressure, with another number for each resource and kind."""
    folder = tmp_path / "pressure"
    folder.mkdir()
    for name, numbers in (("memory", (1, 2)), ("io", (3, 4)), ("cpu", (5, 6))):
        (folder / name).write_text(LINES.format(*(f"{each}.00" for each in numbers)))
    monkeypatch.setattr(proc, "_PROC", tmp_path)
    return folder


@pytest.mark.parametrize(("measure", "name", "percent"), MEASURES)
def test_pressure_is_that_of_the_resource_over_ten_seconds(
    pressure: Path, measure: Callable[[], float | None], name: str, percent: float
) -> None:
    assert measure() == percent

    (pressure / name).write_text("other avg10=1.00 avg60=1.00 avg300=1.00 total=1\n")
    with pytest.raises(HostError, match=f"{name} has no line"):
        measure()

    (pressure / name).unlink()
    assert measure() is None


GIB = 1 << 30

STAT = "anon 1\ninactive_file {}\nactive_file 3\n"


@pytest.fixture
def inner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a group of a container, in which we are, on a host of 8 GiB of which 4 are left."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemAvailable: {4 << 20} kB\n")
    inner = tmp_path / "container/daemon"
    inner.mkdir(parents=True)
    monkeypatch.setattr(proc, "_PROC", tmp_path)
    monkeypatch.setattr(cgroupfs, "CGROUP_ROOT", inner.parent)
    monkeypatch.setattr(cgroupfs, "own", lambda: inner)
    monkeypatch.setattr(cgroupfs, "of_container", lambda: None)
    monkeypatch.setattr(proc, "is_root", lambda: False)
    return inner


def limit(group: Path, maximum: int | str, used: int = 0, inactive_file: int = 0) -> None:
    """Write what the kernel says of a group's memory."""
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(STAT.format(inactive_file))


def test_memory_is_the_hosts_without_a_lower_limit(inner: Path) -> None:
    assert proc.memory_bytes() == (8 * GIB, 4 * GIB)
    limit(inner, "max", 7 * GIB)
    limit(inner.parent, 16 * GIB, 1 * GIB)
    assert proc.memory_bytes() == (8 * GIB, 4 * GIB)


def test_memory_is_that_of_the_narrowest_group_and_unused_files_count_as_left(inner: Path) -> None:
    limit(inner, 3 * GIB, 1 * GIB)
    limit(inner.parent, 6 * GIB, 5 * GIB, inactive_file=GIB // 2)

    assert proc.memory_bytes() == (3 * GIB, GIB + GIB // 2)


def test_a_group_above_its_limit_has_no_memory_left(inner: Path) -> None:
    limit(inner, 1 * GIB, 2 * GIB)

    assert proc.memory_bytes() == (1 * GIB, 0)


def test_a_host_without_cgroup_v2_has_its_own_memory(
    inner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(inner, 1 * GIB)
    monkeypatch.setattr(cgroupfs, "own", lambda: None)

    assert proc.memory_bytes() == (8 * GIB, 4 * GIB)


def test_sandboxes_of_root_have_the_containers_memory_and_not_their_daemons_services(
    inner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(inner, 1 * GIB)
    limit(inner.parent, 3 * GIB, 1 * GIB)
    monkeypatch.setattr(proc, "is_root", lambda: True)

    assert proc.memory_bytes() == (3 * GIB, 2 * GIB)
