"""Summaries of samples, what the machine is, and what processes weigh.

Times are milliseconds.  A quantile is always one of the samples (the smallest that at
least so many of them do not exceed), so that no figure is of something that never happened.
"""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from forkd.host import proc

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Json = dict[str, Any]

MIB = 1 << 20

KVM_STATISTICS = Path("/sys/kernel/debug/kvm")
"""Counters of each machine, in folders named after its process."""

_KIB = 1 << 10


def quantile(samples: Iterable[float], percent: int) -> float:
    """Return the smallest sample that `percent` of them do not exceed.

    Raises:
        ValueError: There are no samples.
    """
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("no samples")
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def median(samples: Iterable[float]) -> float:
    """Return the quantile of 50 percent."""
    return quantile(samples, 50)


def summary(samples_ms: Sequence[float]) -> Json:
    """Return the figures that are kept of some latencies."""
    return {
        "count": len(samples_ms),
        "p50_ms": quantile(samples_ms, 50),
        "p99_ms": quantile(samples_ms, 99),
        "min_ms": min(samples_ms),
    }


class Stopwatch:
    """Milliseconds since it was made."""

    def __init__(self) -> None:
        self._began = perf_counter()

    def ms(self) -> float:
        """Return how long ago it was made."""
        return (perf_counter() - self._began) * 1e3


def machine(place: str) -> Json:
    """Describe the machine that we run on, called `place`, so that figures can be told apart."""
    total, _ = proc.memory_bytes()
    return {
        "place": place,
        "hostname": platform.node(),
        "kernel": platform.release(),
        "cpu": proc.cpu().model,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": total // MIB,
        "nested_paging": _read("/sys/module/kvm_amd/parameters/npt").strip()
        or _read("/sys/module/kvm_intel/parameters/ept").strip(),
        "load_1m": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def private_mib(pid: int) -> float:
    """Return how much memory a process has that no other shares with it, in MiB.

    Raises:
        OSError: There is no such process.
    """
    fields: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * _KIB
    return (fields["Private_Clean"] + fields["Private_Dirty"]) / MIB


def guest_faults(pid: int) -> int | None:
    """Return how often a guest touched memory that KVM had not mapped for it yet.

    None where the kernel's debug file system does not show it, or not to us.
    """
    try:
        folders = list(KVM_STATISTICS.glob(f"{pid}-*"))
        return sum(int((folder / "pf_fixed").read_text()) for folder in folders) or None
    except OSError:
        return None


def available_mib() -> float:
    """Return how much memory the machine could still give out."""
    return proc.memory_bytes()[1] / MIB


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
