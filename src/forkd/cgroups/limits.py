"""What a sandbox's limits are in the words of cgroup v2."""

from __future__ import annotations

from dataclasses import dataclass

CONTROLLERS = ("cpu", "memory", "pids")
"""What a group of ours needs from the group above it."""

CPU_PERIOD_US = 100_000
"""Over how long CPU time is counted, the kernel's own default."""

_CPU_QUOTA_US_MIN = 1_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one sandbox's process, guest and VMM together.

    Attributes:
        pids: Threads.
        memory_bytes: Memory, without swap; None for no limit.
        cpus: CPU time in cores; None for no limit.
    """

    pids: int
    memory_bytes: int | None = None
    cpus: float | None = None


def settings(limits: Limits) -> tuple[tuple[str, str], ...]:
    """Return the files to write and their contents, in order."""
    written = [("pids.max", str(limits.pids))]
    if limits.memory_bytes is not None:
        written += [
            ("memory.max", str(limits.memory_bytes)),
            ("memory.swap.max", "0"),
            ("memory.oom.group", "1"),
        ]
    if limits.cpus is not None:
        quota_us = max(round(limits.cpus * CPU_PERIOD_US), _CPU_QUOTA_US_MIN)
        written.append(("cpu.max", f"{quota_us} {CPU_PERIOD_US}"))
    return tuple(written)
