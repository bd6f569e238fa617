"""One cgroup per sandbox that has limits, below one of ours."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from forkd.cgroups.limits import CONTROLLERS, settings
from forkd.errors import ForkdError, HostError
from forkd.host import cgroupfs

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.cgroups.limits import Limits


END_TIMEOUT_S = 30.0
"""How long a killed process may stay in its cgroup while its memory is torn down."""


class CgroupTree:
    """The groups of one daemon's sandboxes; every method may block, and may run in any thread.

    Attributes:
        root: Our own group, directly below one with the controllers.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prepared = False
        self._lock = threading.Lock()

    def usable(self) -> bool:
        """Whether this host lets us limit sandboxes."""
        return cgroupfs.controllers(self.root.parent) >= set(CONTROLLERS)

    def path(self, name: str) -> Path:
        """Return where the group of one sandbox is."""
        return self.root / name

    def create(self, name: str, limits: Limits) -> Path:
        """Make the group of one sandbox with all its limits, or nothing.

        Raises:
            HostError: A limit could not be set.
        """
        self.prepare()
        group = self.path(name)
        cgroupfs.make(group)
        try:
            for file, value in settings(limits):
                cgroupfs.write(group, file, value)
        except ForkdError:
            cgroupfs.remove_empty(group)
            raise
        return group

    def limit(self, name: str, limits: Limits) -> None:
        """Change the limits of the group of one sandbox.

        Raises:
            HostError: The kernel refused, or there is no such group; some may be changed.
        """
        for file, value in settings(limits):
            cgroupfs.write(self.path(name), file, value)

    def memory_bytes(self, name: str) -> int | None:
        """Return what counts against a sandbox's limit of memory; None without a group."""
        return cgroupfs.memory_bytes(self.path(name))

    def out_of_memory(self, name: str) -> str | None:
        """Return what wanted memory if a process of a sandbox was killed for that, or None."""
        events = cgroupfs.memory_events(self.path(name))
        if not events.get("oom_kill"):
            return None
        return "its own limit" if events.get("oom") else "the host"

    def remove(self, name: str) -> None:
        """End what is left in a sandbox's group and remove it; one that is gone is fine.

        Raises:
            HostError: A process did not end within `END_TIMEOUT_S`, or the kernel refused.
        """
        cgroupfs.end(self.path(name), END_TIMEOUT_S)

    def close(self) -> None:
        """Remove our own group if no sandbox has one in it."""
        if self._prepared and not self.names():
            cgroupfs.remove_empty(self.root)
            self._prepared = False

    def names(self) -> tuple[str, ...]:
        """Return the sandboxes that have a group."""
        return cgroupfs.children(self.root)

    def prepare(self) -> None:
        """Make our own group, with the controllers that limits need; idempotent.

        Raises:
            HostError: This host has no cgroup v2, or not all of them.
        """
        with self._lock:
            if self._prepared:
                return
            missing = set(CONTROLLERS) - cgroupfs.controllers(self.root.parent)
            if missing:
                raise HostError(
                    f"limits need cgroup v2 with {', '.join(sorted(missing))} "
                    f"at {self.root.parent}, which this host lacks"
                )
            wanted = " ".join(f"+{name}" for name in CONTROLLERS)
            cgroupfs.write(self.root.parent, "cgroup.subtree_control", wanted)
            cgroupfs.make(self.root)
            cgroupfs.write(self.root, "cgroup.subtree_control", wanted)
            self._prepared = True
