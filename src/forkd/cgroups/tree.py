"""One cgroup per sandbox that has limits, below one of ours."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from forkd.cgroups.limits import CONTROLLERS, DEFAULT, IO, no_io, settings
from forkd.errors import HostError
from forkd.host import cgroupfs, disks, proc

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.cgroups.limits import Limits


END_TIMEOUT_S = 30.0
"""How long a killed process may stay in its cgroup while its memory is torn down."""


DAEMON = "forkd-daemon"
"""Where the daemon goes below a group that it was started in, with whoever is there in a container:
the kernel lets no group but the hierarchy's own both have processes and pass on controllers."""


def delegated() -> Path | None:
    """Return the group below which sandboxes of a daemon can have theirs, if it must be that one.

    Without root that is the group that the daemon was started in, if it belongs to the daemon's
    user, has the controllers and no other process: a service manager makes such a one (systemd:
    `Delegate=yes`).  With root it is the container's, where the daemon sees groups above that: its
    limits hold for sandboxes, too.  None without; root then takes the highest group that it sees.

    Raises:
        HostError: The kernel does not say.
    """
    here = cgroupfs.of_container() if proc.is_root() else cgroupfs.own()
    if here is None:
        return None
    group = here.parent if here.name == DAEMON else here
    if proc.is_root():
        return None if group == cgroupfs.CGROUP_ROOT else group
    exclusive = _can_limit(group) and cgroupfs.processes(group) <= {proc.own_pid()}
    return group if exclusive else None


def _can_limit(group: Path) -> bool:
    """Whether we may make groups in one, and limit them."""
    return cgroupfs.controllers(group) >= set(CONTROLLERS) and cgroupfs.is_ours(group)


ZYGOTES = "zygotes"
"""Where jailed zygotes are, below our own group: so the kernel asks of them no right over a group
above it when they have a child be born in its own."""


class CgroupTree:
    """The groups of one daemon's sandboxes; every method may block, and may run in any thread.

    Attributes:
        root: Our own group, directly below one with the controllers.
        folder: Where what sandboxes write lies: I/O is limited of the disk that it is on.  None if
            none is.
        zygotes: The group of users that jailed zygotes have for that; None without them.
    """

    def __init__(self, root: Path, folder: Path | None = None, zygotes: int | None = None) -> None:
        self.root = root
        self.folder = folder
        self.zygotes = zygotes
        self._prepared = False
        self._lock = threading.Lock()

    def usable(self) -> bool:
        """Whether this host lets us limit sandboxes."""
        return _can_limit(self.root.parent)

    @property
    def prepared(self) -> bool:
        """Whether our own group is there."""
        return self._prepared

    def path(self, name: str) -> Path:
        """Return where the group of one sandbox is."""
        return self.root / name

    def check(self, limits: Limits) -> None:
        """Return if this host can limit I/O as `limits` say; nothing is made.

        Raises:
            HostError: It cannot.
        """
        self._disk(limits)

    def create(self, name: str, limits: Limits, *, by_zygotes: bool = False) -> Path:
        """Make the group of one sandbox with all its limits, or nothing.

        Args:
            name: What it is called.
            limits: Its limits.
            by_zygotes: Whether zygotes have processes born in it.

        Raises:
            HostError: A limit could not be set.
        """
        written = settings(limits, self._disk(limits))
        self.prepare()
        group = self.path(name)
        cgroupfs.make_limited(group, written, DEFAULT, self.zygotes if by_zygotes else None)
        return group

    def limit(self, name: str, limits: Limits) -> None:
        """Change the limits of the group of one sandbox.

        Raises:
            HostError: The kernel refused, or there is no such group; some may be changed.
        """
        for file, value in settings(limits, self._disk(limits)):
            cgroupfs.write(self.path(name), file, value)

    def hurry(self, name: str) -> None:
        """Let a sandbox that is to end do its I/O without limits, if the kernel lets us.

        A process does not end while what it writes waits for its turn.
        """
        group = self.path(name)
        with contextlib.suppress(HostError):  # then it takes longer
            for line in no_io(cgroupfs.io_max(group)):
                cgroupfs.write(group, "io.max", line)

    def memory_bytes(self, name: str) -> int | None:
        """Return what counts against a sandbox's limit of memory; None without a group."""
        return cgroupfs.memory_bytes(self.path(name))

    def disk(self) -> str | None:
        """Return the disk whose I/O is limited and counted, by number; None without one."""
        return None if self.folder is None else disks.disk_of(self.folder)

    def io(self, name: str, disk: str) -> dict[str, int] | None:
        """Return what a sandbox had of a disk, in the kernel's words; None if not counted."""
        return cgroupfs.io_stat(self.path(name), disk)

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
        self.hurry(name)
        cgroupfs.end(self.path(name), END_TIMEOUT_S)

    def close(self) -> None:
        """Remove our own group if no sandbox has one in it."""
        if self._prepared and not self.names():
            self.remove_root()
            self._prepared = False

    def remove_root(self) -> None:
        """Remove our own group, in which no sandbox has one any more, and end zygotes in it.

        Raises:
            HostError: A zygote did not end within `END_TIMEOUT_S`, or the kernel refused.
        """
        cgroupfs.end(self.path(ZYGOTES), END_TIMEOUT_S)
        cgroupfs.remove_empty(self.root)

    def names(self) -> tuple[str, ...]:
        """Return the sandboxes that have a group."""
        return tuple(name for name in cgroupfs.children(self.root) if name != ZYGOTES)

    def prepare(self) -> None:
        """Make our own group, with the controllers that limits need; idempotent.

        Raises:
            HostError: This host has no cgroup v2, or not all of them.
        """
        with self._lock:
            if self._prepared:
                return
            found = cgroupfs.controllers(self.root.parent)
            missing = set(CONTROLLERS) - found
            if missing:
                raise HostError(
                    f"limits need cgroup v2 with {', '.join(sorted(missing))} "
                    f"at {self.root.parent}, which this host lacks"
                )
            self._step_aside()
            wanted = " ".join(f"+{name}" for name in (*CONTROLLERS, *({IO} & found)))
            cgroupfs.write(self.root.parent, "cgroup.subtree_control", wanted)
            cgroupfs.make(self.root)
            cgroupfs.write(self.root, "cgroup.subtree_control", wanted)
            if self.zygotes is not None:
                cgroupfs.make(self.path(ZYGOTES))
                cgroupfs.let_in(self.root, self.zygotes)
            self._prepared = True

    def _step_aside(self) -> None:
        """Empty the group above ours, which could not pass on controllers if it had processes.

        In a container all of its processes are there: its first one, and shells.  They come along;
        those of other namespaces of process ids, which are listed as 0, we cannot move.
        """
        above = self.root.parent
        if cgroupfs.is_top(above):
            return
        there = cgroupfs.processes(above) - {0}
        if there:
            cgroupfs.make(above / DAEMON)
        for pid in there:
            cgroupfs.enter(above / DAEMON, pid)

    def _disk(self, limits: Limits) -> str | None:
        """Return the disk whose I/O is to be limited, by number; None if none is to be."""
        if not limits.has_io:
            return None
        above = self.root.parent
        if IO not in cgroupfs.controllers(above):
            raise HostError(
                f"limits of disk I/O need cgroup v2 with {IO} at {above}, which this host lacks: "
                "ask for none, or boot a kernel with CONFIG_BLK_DEV_THROTTLING"
            )
        disk = self.disk()
        if disk is None:
            raise HostError(
                f"limits of disk I/O need a disk, and the file system of {self.folder} is on no "
                "one disk, as tmpfs, overlay and btrfs are not: ask for none, or have the operator "
                "set FORKD_DISK_DIR to a folder on ext4 or XFS"
            )
        return disk
