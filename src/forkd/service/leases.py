"""What a sandbox has on the host beside its process: a folder, a cgroup, a tap.

`prepare` gives all of it or nothing; `release` takes all of it back and may be called
again.  Both block, and may run in any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.cgroups.limits import Limits
from forkd.cgroups.tree import CgroupTree
from forkd.engine.process import CONSOLE_LOG
from forkd.errors import ForkdError, HostError
from forkd.host import files
from forkd.limits import PIDS_LIMIT_DEFAULT
from forkd.network import taps

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import ForkOptions
    from forkd.network.plan import Slot
    from forkd.service.settings import HostSettings

KEPT_FILES = frozenset({CONSOLE_LOG, f"{CONSOLE_LOG}.1"})
"""What is kept of a sandbox that ended by itself, so that somebody can see why."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """What a sandbox was given.

    Attributes:
        directory: Its folder.
        cgroup: Its group; None without limits.
        slot: Its link; None without a network.
    """

    directory: Path
    cgroup: Path | None
    slot: Slot | None


class Resources:
    """Gives and takes what sandboxes have on the host."""

    def __init__(self, settings: HostSettings) -> None:
        self._sandboxes = settings.sandboxes_dir
        self._plan = settings.network
        self.cgroups = CgroupTree(settings.cgroup_root)

    def directory(self, place: SandboxId) -> Path:
        """Return the folder that was made under an id."""
        return self._sandboxes / place

    def prepare(self, sandbox: SandboxId, limits: Limits | None, slot: Slot | None) -> Place:
        """Give a sandbox all it needs, or nothing.

        Raises:
            HostError: The kernel refused a part of it.
        """
        directory = self.directory(sandbox)
        try:
            directory.mkdir(mode=0o700)
            cgroup = None if limits is None else self.cgroups.create(sandbox, limits)
            if slot is not None:
                taps.create(slot)
        except ForkdError:
            self.release(sandbox, slot)
            raise
        except OSError as error:
            raise HostError(f"cannot make {directory}: {error.strerror}") from error
        return Place(directory, cgroup, slot)

    def release(self, place: SandboxId, slot: Slot | None, *, keep_console: bool = False) -> None:
        """Take back what was made under an id, and end what is left in its cgroup.

        Raises:
            HostError: The kernel refused.
        """
        self.cgroups.remove(place)
        if slot is not None:
            taps.remove(slot)
        directory = self.directory(place)
        try:
            if keep_console:
                _remove_all_but(directory, KEPT_FILES)
            else:
                files.remove_from_under(directory)
        except OSError as error:
            raise HostError(f"cannot remove {directory}: {error.strerror}") from error


def limits_of(options: ForkOptions) -> Limits | None:
    """Return the limits that a fork asked for; None if it asked for none.

    Without a limit there is no cgroup: making a VM inside one costs many times as
    much on hosts whose KVM recovers huge pages.
    """
    asked = (options.memory_limit_mib, options.cpu_limit, options.pids_limit)
    if all(limit is None for limit in asked):
        return None
    memory_mib = options.memory_limit_mib
    return Limits(
        pids=options.pids_limit or PIDS_LIMIT_DEFAULT,
        memory_bytes=None if memory_mib is None else memory_mib * _MIB,
        cpus=options.cpu_limit,
    )


def _remove_all_but(directory: Path, kept: frozenset[str]) -> None:
    if not directory.exists():
        return
    for entry in directory.iterdir():
        if entry.name not in kept:
            files.remove_tree(entry)
