"""What a helper machine is made of, as values.

`MachineConfig` is complete: `qemu.command` and `initramfs.build_initramfs` are
functions of it and of where the state directory is.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.machine.accel import Accel, default_accel
from forkd.machine.counter import counter_khz

if TYPE_CHECKING:
    from pathlib import Path

CPUS_MAX = 8
"""Most virtual CPUs; beyond that emulated ones spend their time on each other."""

CPUS_EMULATED = 1
"""Virtual CPUs of an emulated machine, unless more are asked for.

With two, about one guest in some thousands faults on the first instruction after it is entered, and
once in a while so does the machine's own kernel; with one, none did (ADR 0015).
"""

POSSIBLE_CPUS_MAX = 8192
"""Most processors that Debian's kernel can make room for."""

MEMORY_MIB_MIN = 1024
"""Least memory with which the daemon and one sandbox fit, in MiB."""

MEMORY_SHARE = 0.6
"""Part of the host's memory that a machine gets by default."""

MEMORY_VARIABLE = "FORKD_MACHINE_MEMORY_MIB"
"""The environment variable that sets it."""

QEMU = "qemu-system-x86_64"
"""The program that runs a machine, unless `QEMU_VARIABLE` names another."""

QEMU_VARIABLE = "FORKD_MACHINE_QEMU"
"""The environment variable that names another QEMU."""

STATE_DISK_GIB = 64
"""Size of the state disk; a sparse file, so only what is written counts."""

SHARES_MAX = 16
"""Most shared folders; each takes one PCI slot."""


@dataclass(frozen=True, slots=True)
class Share:
    """A folder of the host that the machine sees.

    Attributes:
        source: The folder on the host.
        target: Where it is mounted inside.
        writable: Whether the machine may change it.
        layer: Folder of the machine's own, on its disk, into which it writes what it changes there;
            the host's folder stays as it is.  None if it may change nothing.
        changing: Whether the host changes it while the machine runs.  Such a
            share asks the host at every open; any other remembers what it saw.
    """

    source: Path
    target: str
    writable: bool = False
    changing: bool = True
    layer: str | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """A TCP port of the host's loopback that leads to one of the machine's.

    Attributes:
        host_port: On the host; 0 means any, and the machine says which it is.
        guest_port: In the machine; an HTTP server's.
    """

    host_port: int
    guest_port: int


def default_cpus(accel: Accel) -> int:
    """Return how many CPUs a machine gets: this host's, at most `CPUS_MAX`, or `CPUS_EMULATED`."""
    if accel is Accel.TCG:
        return CPUS_EMULATED
    return min(len(os.sched_getaffinity(0)), CPUS_MAX)


def default_memory_mib() -> int:
    """Return what `FORKD_MACHINE_MEMORY_MIB` says, or else `MEMORY_SHARE` of this host's memory.

    The share is a multiple of 64 MiB.

    Raises:
        InvalidRequest: The variable is no number.
    """
    if said := os.environ.get(MEMORY_VARIABLE):
        if not (said.isascii() and said.isdecimal()):
            raise InvalidRequest(
                f"{MEMORY_VARIABLE} is {said!r}: must be a number of MiB, such as 8192",
                field=MEMORY_VARIABLE,
            )
        return int(said)
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(int(total_bytes * MEMORY_SHARE) >> 20 & ~63, MEMORY_MIB_MIN)


def default_qemu() -> str:
    """Return the program that `FORKD_MACHINE_QEMU` names, or else `QEMU`.

    Raises:
        InvalidRequest: The variable names no program.
    """
    said = os.environ.get(QEMU_VARIABLE)
    if not said:
        return QEMU
    found = shutil.which(said)
    if found is None:
        raise InvalidRequest(
            f"{QEMU_VARIABLE} is {said!r}: there is no such program; name one, such as "
            f"/opt/qemu/bin/{QEMU}",
            field=QEMU_VARIABLE,
        )
    return os.path.abspath(found)  # noqa: PTH100 - a link stays one: its name may choose the program


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """A helper machine before it is started.

    Attributes:
        kernel: A stock Debian kernel image.
        modules: Its modules, with `modules.dep`.
        release: Its version as `uname -r` says it.
        accel: How QEMU runs it.
        cpus: Virtual CPUs; None for `default_cpus`.
        memory_mib: Memory, in MiB.
        shares: Folders beside the host's programs, which are always there.
        system: Folders of the host's programs; `start` finds them.
        whole_host: Whether it sees all of the host's files: for tests of a checkout, never for a
            machine in which somebody else's code runs.
        forwards: Ports beside the executor's, which is always there.
        counter_khz: How fast the time-stamp counter runs that an emulated machine reads, which is
            the host's; None lets its kernel find out.
        qemu: The program that runs it.
        possible_cpus: Processors that its kernel makes room for, as that of a larger host does;
            None for those it has.
        tuned: Whether its KVM and cgroups are set so that forks do not wait for the kernel, as
            docs/explanation/spawn.md advises; only who measures that wants another machine.
    """

    kernel: Path
    modules: Path
    release: str
    accel: Accel = field(default_factory=default_accel)
    cpus: int | None = None
    memory_mib: int = field(default_factory=default_memory_mib)
    shares: tuple[Share, ...] = ()
    system: tuple[Path, ...] = ()
    whole_host: bool = False
    forwards: tuple[Forward, ...] = ()
    counter_khz: int | None = field(default_factory=counter_khz)
    qemu: str = field(default_factory=default_qemu)
    possible_cpus: int | None = None
    tuned: bool = True

    @property
    def cpu_count(self) -> int:
        """Virtual CPUs, counted."""
        return default_cpus(self.accel) if self.cpus is None else self.cpus

    def __post_init__(self) -> None:
        if not 1 <= self.cpu_count <= CPUS_MAX:
            raise InvalidRequest(f"cpus must be 1 to {CPUS_MAX}, not {self.cpus}", field="cpus")
        if self.memory_mib < MEMORY_MIB_MIN:
            raise InvalidRequest(
                f"the helper machine needs at least {MEMORY_MIB_MIN} MiB of memory, not "
                f"{self.memory_mib}",
                field="memory_mib",
            )
        possible = self.cpu_count if self.possible_cpus is None else self.possible_cpus
        if not self.cpu_count <= possible <= POSSIBLE_CPUS_MAX:
            raise InvalidRequest(
                f"possible_cpus must be {self.cpu_count} to {POSSIBLE_CPUS_MAX}, not "
                f"{self.possible_cpus}",
                field="possible_cpus",
            )
        if len(self.shares) > SHARES_MAX:
            raise InvalidRequest(
                f"at most {SHARES_MAX} shares, not {len(self.shares)}", field="shares"
            )
