"""Whether the host has room for more, looked at before anything is made.

Three things can stand against it: memory that runs out, tasks that wait for memory already
(pressure, as the kernel measures it), and a disk that has nothing to give but its reserve.  New
work is refused then, so that what runs goes on as before.  That tasks wait for the disk, or for
processors, is normal on a host that is made use of; who wants to keep some of both for what runs
sets `FORKD_IO_PRESSURE_MAX` or `FORKD_CPU_PRESSURE_MAX`.  What sandboxes were promised is no
measure: nearly all of it is shared, or never written.  Who wants it bounded anyway sets
`FORKD_MEMORY_OVERCOMMIT`.

Sources: the kernel's Documentation/accounting/psi.rst, and proc(5) for MemAvailable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import CapacityError
from forkd.host import files, proc

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.service.ledger import Ledger
    from forkd.service.settings import AdmissionPolicy

RETRY_AFTER_S = 10
"""When to ask again: over so long the kernel averages the pressure that is looked at."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Admission:
    """Accepts new work, or says what the host lacks.

    Attributes:
        policy: What must be left.
        ledger: Counts what guests were promised.
        disk: A folder of the file system that private disk layers lie on.
        disk_reserve_mib: What writes leave free there.
    """

    policy: AdmissionPolicy
    ledger: Ledger
    disk: Path
    disk_reserve_mib: int

    def check(self, asked_mib: int) -> None:
        """Accept work, or refuse it.

        Args:
            asked_mib: Memory of the guests that it would start.

        Raises:
            CapacityError: There is no room now; it names what is missing, and when to ask again.
        """
        total_bytes, available_bytes = proc.memory_bytes()
        reserve_mib = self.policy.memory_reserve_mib
        if available_bytes < reserve_mib * _MIB:
            raise _full(
                f"the host has {available_bytes // _MIB} MiB of memory left, and keeps "
                f"{reserve_mib} MiB (FORKD_MEMORY_RESERVE_MIB)"
            )
        self._check_promises(asked_mib, total_bytes)
        self._check_pressure()
        free_mib = files.free_bytes(self.disk) // _MIB
        if free_mib < self.disk_reserve_mib:
            raise _full(
                f"the file system of {self.disk} has {free_mib} MiB left, and keeps "
                f"{self.disk_reserve_mib} MiB (FORKD_DISK_RESERVE_MIB)"
            )

    def guest_bytes_max(self, total_bytes: int) -> int:
        """Return the most memory of one guest, where the host has so much in all.

        More than that is only for an operator to allow, who knows that guests leave most of theirs
        untouched: what they do touch has to be in the host's memory.
        """
        return int(total_bytes * max(1.0, self.policy.memory_overcommit or 1.0))

    def _check_promises(self, asked_mib: int, total_bytes: int) -> None:
        factor = self.policy.memory_overcommit
        if factor is None:
            return
        limit_mib = int(total_bytes * factor) // _MIB
        promised_mib = self.ledger.promised().memory_mib + asked_mib
        if promised_mib > limit_mib:
            raise _full(
                f"guests would have {promised_mib} MiB of memory together, {asked_mib} MiB of it "
                f"new, of at most {limit_mib} MiB (FORKD_MEMORY_OVERCOMMIT={factor:g})"
            )

    def _check_pressure(self) -> None:
        policy = self.policy
        for what, limit, measure, name in (
            ("memory", policy.memory_pressure_max, proc.memory_pressure, "MEMORY"),
            ("I/O", policy.io_pressure_max, proc.io_pressure, "IO"),
            ("processors", policy.cpu_pressure_max, proc.cpu_pressure, "CPU"),
        ):
            percent = None if limit is None else measure()
            if limit is not None and percent is not None and percent > limit:
                raise _full(
                    f"tasks of the host have waited for {what} {percent:g} % of the last "
                    f"{RETRY_AFTER_S} seconds, of at most {limit:g} % (FORKD_{name}_PRESSURE_MAX)"
                )


def _full(problem: str) -> CapacityError:
    return CapacityError(f"{problem}; try again, or end a sandbox", retry_after_s=RETRY_AFTER_S)
