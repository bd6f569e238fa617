"""What the kernel says of pressure is read from the line that is meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
from forkd.host import proc

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
