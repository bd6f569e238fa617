"""What this host is and how full it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostInfo:
    """The host as the daemon sees it now.

    Attributes:
        version: forkd's version.
        hostname: The host's name.
        kernel: Its kernel's release.
        cpu_model: The CPU's name, in the kernel's words.
        cpus: CPUs that the daemon may use.
        memory_bytes: Memory of the host.
        memory_available_bytes: What could be given out now, in the kernel's estimate.
        kvm: Whether /dev/kvm can be opened.
        pvm: Whether that KVM is PVM, which runs stock guests by interpretation only.
        cgroups: Whether cgroup v2 can limit sandboxes here.
        network: Whether taps can be made here.
        jail: Whether machines are jailed.
        state_free_bytes: Free space where snapshots are stored.
        snapshots: How many snapshots the caller may use.
        sandboxes: How many of the sandboxes that it may see are alive.
        uptime_s: Since the daemon started.
    """

    version: str
    hostname: str
    kernel: str
    cpu_model: str
    cpus: int
    memory_bytes: int
    memory_available_bytes: int
    kvm: bool
    pvm: bool
    cgroups: bool
    network: bool
    jail: bool
    state_free_bytes: int
    snapshots: int
    sandboxes: int
    uptime_s: float
