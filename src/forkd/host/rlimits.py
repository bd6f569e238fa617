"""What a process that we start may take of the host, whatever the daemon itself may.

The daemon's own limits are those of a server: as many open files as the host gives, whatever umask
and core dumps the operator has.  None of that is fit for what we start, so each start says what
it gives.  No process of ours leaves a core dump: it would hold the memory of guests.

The limits are set between fork and exec by util-linux' `prlimit`, since code of ours there is not
safe in a program with threads.  Without it nothing is started.  They are never above the daemon's
own hard limits, which only root may exceed.
"""

from __future__ import annotations

import os
import resource
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import HostError
from forkd.host.faults import kernel_call
from forkd.limits import DISK_LIMIT_MIB_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PRLIMIT = "prlimit"
"""The program that sets limits."""

CORE_BYTES_MAX = 1
"""Largest core dump: none, as no dump is that small.  With 0 the kernel still pipes one to a
program (`kernel.core_pattern` with a bar); with 1 it does not."""

FILE_BYTES_MAX = DISK_LIMIT_MIB_MAX << 20
"""Longest file that a process of ours may write: the largest disk that a sandbox may have."""

USER_PROCESSES_MAX = 262_144
"""Most processes and threads that a user may have for ours to start one more: a dozen for each
sandbox of a full host.  The kernel counts all of a user's, and none of root's; what bounds one
sandbox is `PIDS_LIMIT_MAX`."""

VMM_OPEN_FILES_MAX = 65_536
"""Most open files of a VMM process: a zygote has some for each child of the largest fork."""

VMM_LOCKED_BYTES_MAX = 0
"""Most memory that a VMM process may lock: guests' memory can be swapped out."""

COMPARER_OPEN_FILES_MAX = 256
"""Most open files of a comparison: the layers of two disks."""

PACKER_OPEN_FILES_MAX = 1_024
"""Most open files of a process that reads or writes a pack: the files of all its links."""

BUILDER_OPEN_FILES_MAX = 4_096
"""Most open files of a program of a build; some close every number that they may have."""

BUILDER_LOCKED_BYTES_MAX = 8 << 20
"""Most memory that a program of a build may lock, for its keys: what the kernel gives by itself."""

PRIVATE_UMASK = 0o077
"""What a process of ours writes is its user's alone, unless it says otherwise."""

IMAGE_UMASK = 0o022
"""What a program of a build writes is for every user of the guest; the folder it is in is not."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one kind of process may take.

    Attributes:
        open_files_max: Descriptors that it may have.
        locked_bytes_max: Memory that it may keep from being swapped out.
        umask: Permissions that its new files do not have.
    """

    open_files_max: int
    locked_bytes_max: int
    umask: int

    def command(self, args: Sequence[str | Path]) -> list[str]:
        """Return the words that start a program, given by path, under these limits.

        The umask is for whoever starts them to set.

        Raises:
            HostError: There is no such program, or no `prlimit`, or the kernel does not say.
            CapacityError: It has no memory to say it.
        """
        if not _is_program(str(args[0])):
            raise HostError(f"cannot start {args[0]}: there is no such program")
        folders = f"{os.environ.get('PATH', '')}:{os.defpath}".split(":")
        places = (f"{folder}/{PRLIMIT}" for folder in folders if folder)
        prlimit = next(filter(_is_program, places), None)
        if prlimit is None:
            raise HostError(f"{PRLIMIT} is not installed (Debian package util-linux)")
        most = {
            "core": (resource.RLIMIT_CORE, CORE_BYTES_MAX),
            "fsize": (resource.RLIMIT_FSIZE, FILE_BYTES_MAX),
            "memlock": (resource.RLIMIT_MEMLOCK, self.locked_bytes_max),
            "nofile": (resource.RLIMIT_NOFILE, self.open_files_max),
            "nproc": (resource.RLIMIT_NPROC, USER_PROCESSES_MAX),
        }
        words = [f"--{name}={_at_most_ours(*each)}" for name, each in most.items()]
        return [prlimit, *words, "--", *map(str, args)]


VMM = Limits(VMM_OPEN_FILES_MAX, VMM_LOCKED_BYTES_MAX, PRIVATE_UMASK)
COMPARER = Limits(COMPARER_OPEN_FILES_MAX, VMM_LOCKED_BYTES_MAX, PRIVATE_UMASK)
PACKER = Limits(PACKER_OPEN_FILES_MAX, VMM_LOCKED_BYTES_MAX, PRIVATE_UMASK)
BUILDER = Limits(BUILDER_OPEN_FILES_MAX, BUILDER_LOCKED_BYTES_MAX, IMAGE_UMASK)


def _is_program(path: str) -> bool:
    """Whether a file can be executed; unlike `shutil.which`, a kernel that fails is no answer."""
    with kernel_call(f"look for {path}"):
        try:
            mode = os.stat(path).st_mode  # noqa: PTH116 - a path as words
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return False  # nor is there one in a folder of the search path that is others'
    return stat.S_ISREG(mode) and bool(mode & 0o111)


def _at_most_ours(what: int, wanted: int) -> int:
    _, hard = resource.getrlimit(what)
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
