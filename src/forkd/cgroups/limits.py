"""What a sandbox's limits are in the words of cgroup v2."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forkd.limits import CPU_WEIGHT_DEFAULT

CONTROLLERS = ("cpu", "memory", "pids")
"""What a group of ours needs from the group above it."""

IO = "io"
"""What limits of disk I/O need besides; a host without it can have sandboxes without them."""

CPU_PERIOD_US = 100_000
"""Over how long CPU time is counted, the kernel's own default."""

DEFAULT = frozenset({("cpu.weight", str(CPU_WEIGHT_DEFAULT))})
"""What a new group has by itself."""

_CPU_QUOTA_US_MIN = 1_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one sandbox's process, guest and VMM together.

    Attributes:
        pids: Threads.
        memory_bytes: Memory, without swap; None for no limit.
        cpus: CPU time in cores; None for no limit.
        io_bytes_s: Bytes read, and bytes written, in a second; None for no limit.
        io_ops_s: Operations likewise.
        cpu_weight: Share of CPU time beside the other groups of ours.
    """

    pids: int
    memory_bytes: int | None = None
    cpus: float | None = None
    io_bytes_s: int | None = None
    io_ops_s: int | None = None
    cpu_weight: int = CPU_WEIGHT_DEFAULT

    @property
    def has_io(self) -> bool:
        """Whether disk I/O is limited."""
        return self.io_bytes_s is not None or self.io_ops_s is not None

    def for_seeds(self, seeds: int) -> Limits:
        """Return the limits of a sandbox of which there are so many seeds.

        A page counts for the group that wrote it first as long as any process has it.  So what a
        sandbox overwrites after a branch counts again, for each seed that has what was there.
        """
        if self.memory_bytes is None:
            return self
        return replace(self, memory_bytes=self.memory_bytes * (1 + seeds))


def settings(limits: Limits, disk: str | None = None) -> tuple[tuple[str, str], ...]:
    """Return the files to write and their contents, in order.

    The last is that of I/O, which the kernel takes whole or not at all.

    Args:
        limits: What to set.
        disk: Number of the disk whose I/O is limited; None only if it is not.
    """
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
    if disk is not None:
        written.append(("io.max", f"{disk} {_io(limits.io_bytes_s, limits.io_ops_s)}"))
    return tuple(written)


def no_io(io_max: str) -> tuple[str, ...]:
    """Return what to write to `io.max`, line by line, so that nothing is left of what is in it."""
    return tuple(f"{line.split()[0]} {_io(None, None)}" for line in io_max.splitlines())


def _io(bytes_s: int | None, ops_s: int | None) -> str:
    most_bytes, most_ops = ("max" if each is None else str(each) for each in (bytes_s, ops_s))
    return f"rbps={most_bytes} wbps={most_bytes} riops={most_ops} wiops={most_ops}"
