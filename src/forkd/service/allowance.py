"""What a sandbox may take of the host, guest and VMM together: its cgroup's limits.

What was not asked for follows from the snapshot: the memory and the virtual CPUs that its guest
has, and what its VMM needs beside them.  So no guest notices a limit that it was not given, and a
VMM that somebody took over has no more of the host than the guest was promised.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from forkd.cgroups.limits import Limits
from forkd.limits import (
    CPU_WEIGHT_DEFAULT,
    MEMORY_LIMIT_MIB_MAX,
    PIDS_LIMIT_DEFAULT,
    VMM_CPUS,
    VMM_MEMORY_MIB,
    VMM_MEMORY_SHARE,
    VMM_MEMORY_USED_MIB,
)

if TYPE_CHECKING:
    from forkd.model.sandbox import ForkOptions, Sandbox
    from forkd.model.snapshot import Snapshot

_MIB = 1 << 20


def allow(options: ForkOptions, snapshot: Snapshot) -> ForkOptions:
    """Return how children of a snapshot are forked: with each limit that was not asked for."""
    memory_mib, cpus, pids = options.memory_limit_mib, options.cpu_limit, options.pids_limit
    return replace(
        options,
        memory_limit_mib=_memory_mib(snapshot) if memory_mib is None else memory_mib,
        cpu_limit=snapshot.vcpus + VMM_CPUS if cpus is None else cpus,
        pids_limit=PIDS_LIMIT_DEFAULT if pids is None else pids,
    )


def limits_of(options: ForkOptions | Sandbox) -> Limits | None:
    """Return the limits of a sandbox; None, and so no cgroup, if it has none."""
    asked = (
        options.memory_limit_mib,
        options.cpu_limit,
        options.cpu_weight,
        options.pids_limit,
        options.io_limit_mib_s,
        options.io_limit_ops,
    )
    if all(limit is None for limit in asked):
        return None
    memory_mib, io_mib_s = options.memory_limit_mib, options.io_limit_mib_s
    return Limits(
        pids=options.pids_limit or PIDS_LIMIT_DEFAULT,
        memory_bytes=None if memory_mib is None else memory_mib * _MIB,
        cpus=options.cpu_limit,
        io_bytes_s=None if io_mib_s is None else io_mib_s * _MIB,
        io_ops_s=options.io_limit_ops,
        cpu_weight=options.cpu_weight or CPU_WEIGHT_DEFAULT,
    )


def guest_memory_bytes(sandbox: Sandbox, snapshot: Snapshot | None) -> int | None:
    """Return what a sandbox's guest may use of its memory, so that its limit has room for its VMM.

    Args:
        sandbox: It.
        snapshot: What it goes back to; None if that is not known: what is returned may then be
            more than its guest has.

    Returns:
        None if its guest may use all that it has.
    """
    limit_mib = sandbox.memory_limit_mib
    if limit_mib is None:
        return None
    # A limit that follows from a snapshot is larger than its guest by that share.
    vmm_mib = VMM_MEMORY_USED_MIB + limit_mib // (VMM_MEMORY_SHARE + 1)
    limit_bytes = max(limit_mib - vmm_mib, 0) * _MIB
    if snapshot is not None and limit_bytes >= snapshot.memory_bytes:
        return None
    return limit_bytes


def _memory_mib(snapshot: Snapshot) -> int:
    guest_mib = -(-snapshot.memory_bytes // _MIB)
    return min(guest_mib + guest_mib // VMM_MEMORY_SHARE + VMM_MEMORY_MIB, MEMORY_LIMIT_MIB_MAX)
