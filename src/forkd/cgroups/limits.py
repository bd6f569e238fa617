"""What a sandbox's limits are in the words of cgroup v2."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forkd.limits import CPU_WEIGHT_DEFAULT

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
        cpu_weight: Share of CPU time beside the other groups of ours.
    """

    pids: int
    memory_bytes: int | None = None
    cpus: float | None = None
    cpu_weight: int = CPU_WEIGHT_DEFAULT

    def for_seeds(self, seeds: int) -> Limits:
        """Return the limits of a sandbox of which there are so many seeds.

        A page counts for the group that wrote it first as long as any process has it.  So what a
        sandbox overwrites after a branch counts again, for each seed that has what was there.
        """
        if self.memory_bytes is None:
            return self
        return replace(self, memory_bytes=self.memory_bytes * (1 + seeds))


def settings(limits: Limits) -> tuple[tuple[str, str], ...]:
    """Return the files to write and their contents, in order."""
    written = [("pids.max", str(limits.pids)), ("cpu.weight", str(limits.cpu_weight))]
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
