"""Say what this host is and how full it is."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import version
from typing import TYPE_CHECKING

from forkd.host import kvm, netlink, proc
from forkd.model.host import HostInfo

if TYPE_CHECKING:
    from forkd.service.resources import Resources
    from forkd.service.settings import HostSettings


def read(
    settings: HostSettings,
    resources: Resources,
    *,
    snapshots: int,
    sandboxes: int,
    uptime_s: float,
) -> HostInfo:
    """Return what this host is; blocks for a moment.

    Raises:
        HostError: The kernel does not say.
    """
    memory_bytes, memory_available_bytes = proc.memory_bytes()
    return HostInfo(
        version=version("forkd"),
        hostname=platform.node(),
        kernel=platform.release(),
        cpu_model=proc.cpu().model,
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes,
        memory_available_bytes=memory_available_bytes,
        kvm=kvm.is_usable(),
        pvm=kvm.is_pvm(),
        cgroups=resources.cgroups.usable(),
        network=netlink.can_make_taps(),
        state_free_bytes=shutil.disk_usage(settings.state_dir).free,
        snapshots=snapshots,
        sandboxes=sandboxes,
        uptime_s=uptime_s,
    )
