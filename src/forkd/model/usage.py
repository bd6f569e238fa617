"""What a sandbox uses of its host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from forkd.model.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went over a network interface, as its guest sees it."""

    received_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DiskIo:
    """What the disk was asked for, past the host's page cache."""

    read_bytes: int = 0
    written_bytes: int = 0
    reads: int = 0
    writes: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What one sandbox uses; all but `cpu_s`, `traffic` and `io` at one time.

    Attributes:
        sandbox: Which.
        at: When it was measured.
        cpu_s: CPU time that its machine has had since it was forked.
        private_bytes: Private memory of its machine.
        private_exact: Whether that was counted; else it is as much at most, because it includes
            what branches share with their source.
        disk_bytes: Disk that its machine has written, with what it shares with its branches.
        traffic: What went over its network since it was forked; None without one.
        cgroup_bytes: What the kernel counts against its memory limit; None without a limit.
        io: What counts against its limits of I/O, since it was forked; None where the kernel does
            not count it.
    """

    sandbox: Sandbox
    at: datetime
    cpu_s: float
    private_bytes: int
    private_exact: bool
    disk_bytes: int
    traffic: Traffic | None
    cgroup_bytes: int | None
    io: DiskIo | None = None
