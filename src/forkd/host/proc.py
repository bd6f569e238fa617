"""What /proc says: memory, CPUs, processes, limits.

That a process is gone is an answer; that the kernel does not say is a `HostError`, or a
`CapacityError`, since whoever asks may end what it does not find.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import os
import platform
import resource
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import HostError
from forkd.host import cgroupfs
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROC = Path("/proc")
_KIB = 1024

_UTIME = 11
"""Where /proc/PID/stat has the CPU time in user mode, behind the name; in the kernel is next."""

_NO_PRESSURE = (errno.ENOENT, errno.EOPNOTSUPP)
"""What a kernel says that was built or booted without measuring pressure."""

_BLOCK_BYTES = 512
"""What `st_blocks` counts."""

_SENT_BYTES = 8
"""Where /proc/net/dev has the bytes that a link has sent; those received are first."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU's name and features, in the kernel's words."""

    model: str
    features: tuple[str, ...]


def cpu() -> Cpu:
    """Return what the first CPU is; all of a host's are alike to us.

    Raises:
        HostError: The kernel does not say.
    """
    fields: dict[str, str] = {}
    for line in _text(_PROC / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return Cpu(
        model=fields.get("model name", platform.machine()),
        features=tuple(sorted(fields.get("flags", "").split())),
    )


def environment() -> Mapping[str, str]:
    """Return this process's environment variables."""
    return os.environ


def home() -> Path:
    """Return the home folder of whoever runs us."""
    return Path.home()


def own_pid() -> int:
    """Return the number of this process."""
    return os.getpid()


def hostname() -> str:
    """Return what this host calls itself."""
    return os.uname().nodename


def kernel() -> str:
    """Return the release of the kernel."""
    return os.uname().release


def memory_bytes() -> tuple[int, int]:
    """Return the host's memory and how much of it could be given out now.

    If the groups in which sandboxes are have a limit, as in a container, that limit and what is
    left of it, if that is less.  A root daemon's sandboxes are within its container's group or, if
    it is in none, directly below the hierarchy, so that its own service's limit is not theirs;
    another's are within its own group.

    Raises:
        HostError: The kernel does not say.
    """
    fields: dict[str, int] = {}
    for line in _text(_PROC / "meminfo").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * _KIB
    try:
        host = fields["MemTotal"], fields["MemAvailable"]
    except KeyError as error:
        raise HostError(f"/proc/meminfo does not have {error}") from error
    own = (cgroupfs.of_container() or cgroupfs.CGROUP_ROOT) if is_root() else cgroupfs.own()
    limits = [] if own is None else cgroupfs.memory_limits(own)
    totals, lefts = zip(host, *limits, strict=True)
    return min(totals), min(lefts)


def memory_pressure() -> float | None:
    """Return the host's memory pressure, PSI's `full avg10`, in percent.

    None if this kernel does not measure it.

    Raises:
        HostError: The kernel does not say.
    """
    return _pressure("memory", "full")


def io_pressure() -> float | None:
    """Return the host's I/O pressure, PSI's `full avg10`, in percent.

    None if this kernel does not measure it.

    Raises:
        HostError: The kernel does not say.
    """
    return _pressure("io", "full")


def cpu_pressure() -> float | None:
    """Return the host's CPU pressure, PSI's `some avg10`, in percent.

    None if this kernel does not measure it.

    Raises:
        HostError: The kernel does not say.
    """
    return _pressure("cpu", "some")


def _pressure(resource: str, kind: str) -> float | None:
    path = _PROC / "pressure" / resource
    with kernel_call(f"read {path}"):
        try:
            text = path.read_text()
        except OSError as error:
            if error.errno in _NO_PRESSURE:
                return None
            raise
    for line in text.splitlines():
        found, average, *_ = line.split()
        if found == kind:
            return float(average.removeprefix("avg10="))
    raise HostError(f"{path} has no line `{kind}`")


def is_root() -> bool:
    """Whether we are root."""
    return os.geteuid() == 0


def user() -> tuple[str, int]:
    """Return who we are, by name and number."""
    return getpass.getuser(), os.getuid()


def cpus_available() -> int:
    """Return how many CPUs we may use."""
    return len(os.sched_getaffinity(0))


def processes() -> tuple[int, ...]:
    """Return every process.

    Raises:
        CapacityError: There are too many open files.
    """
    with kernel_call("list processes"):
        return tuple(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _text(path: Path) -> str:
    with kernel_call(f"read {path}"):
        return path.read_text()


def has_option_below(pid: int, option: str, folder: Path) -> bool:
    """Whether a process was started with `option` and, after it, a path below `folder`."""
    words = _of(pid, "cmdline").split("\0")
    return any(name == option and value.startswith(f"{folder}/") for name, value in pairwise(words))


def name(pid: int) -> str:
    """Return what a process calls itself; empty if it is gone."""
    return _of(pid, "comm").rstrip("\n")


def parent(pid: int) -> int | None:
    """Return the process that another is a child of; None if it is gone."""
    stat = _of(pid, "stat")
    if not stat:
        return None
    _state, above, *_ = stat.rpartition(")")[2].split()
    return int(above)


def children(pid: int) -> tuple[int, ...]:
    """Return the processes that one has forked and that have not ended; none if it is gone.

    Raises:
        HostError: The kernel does not say (it has no `CONFIG_PROC_CHILDREN`).
    """
    with kernel_call(f"list the children of process {pid}"):
        try:
            threads = tuple((_PROC / str(pid) / "task").iterdir())
            found = [(thread / "children").read_text() for thread in threads]
        except (FileNotFoundError, ProcessLookupError):
            if (_PROC / str(pid)).exists():
                raise
            return ()
    return tuple(int(child) for line in found for child in line.split())


def anonymous_bytes(pid: int) -> int:
    """Return the memory that a process does not share with a file; 0 if it is gone.

    Cheap, and at least what `private_bytes` returns.
    """
    statm = _of(pid, "statm")
    if not statm:
        return 0
    resident, shared = statm.split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def private_bytes(pid: int) -> int | None:
    """Return the memory that nobody shares with a process; None if it is gone.

    The kernel walks the whole process for this: milliseconds, not microseconds.
    """
    found = shares(pid)
    return None if found is None else found[0]


def shares(pid: int) -> tuple[int, int] | None:
    """Return the private memory of a process, and all of it; None if it is gone.

    In the latter a page that n processes share counts as an nth of it.  As slow as `private_bytes`.
    """
    lines = _of(pid, "smaps_rollup").splitlines()[1:]
    if not lines:
        return None
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}

    def total_bytes(*names: str) -> int:
        return sum(int(fields[name].split()[0]) for name in names if name in fields) * _KIB

    private = total_bytes("Private_Clean", "Private_Dirty", "Private_Hugetlb")
    return private, total_bytes("Pss")


def _of(pid: int, file: str) -> str:
    """Return what the kernel says of a process; empty if it is gone, or not ours to look at.

    Raises:
        CapacityError: There are too many open files, or too little memory: nothing is known.
    """
    with kernel_call(f"look at process {pid}", pid=pid):
        try:
            # Not a `Path`: a fork looks at each of its children.
            with open(f"{_PROC}/{pid}/{file}", "rb") as opened:  # noqa: PTH123
                return os.fsdecode(opened.read())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return ""


def cpu_s(pid: int) -> float | None:
    """Return the CPU time that a process has had, its threads included; None if it is gone."""
    stat = _of(pid, "stat")
    if not stat:
        return None
    user, system = stat.rpartition(")")[2].split()[_UTIME : _UTIME + 2]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def nameless_bytes(pid: int, folder: Path) -> int:
    """Return what files without a name take below a folder that a process has open.

    0 if it is gone, or has none.
    """
    prefix = f"{folder}/#"  # what the kernel calls a file that was made with O_TMPFILE
    descriptors = f"{_PROC}/{pid}/fd"
    blocks: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(descriptors):  # noqa: PTH208 - of thousands of processes a second
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(f"{descriptors}/{name}").startswith(prefix):  # noqa: PTH115 - as above
                    found = os.stat(f"{descriptors}/{name}")  # noqa: PTH116 - as above
                    blocks[found.st_ino] = found.st_blocks
    return sum(blocks.values()) * _BLOCK_BYTES


def traffic() -> dict[str, tuple[int, int]]:
    """Return the bytes that each network link has received and sent.

    Raises:
        HostError: The kernel does not say.
    """
    found = {}
    for line in _text(_PROC / "net" / "dev").splitlines()[2:]:
        link, _, counters = line.partition(":")
        fields = counters.split()
        found[link.strip()] = int(fields[0]), int(fields[_SENT_BYTES])
    return found


def raise_open_files_limit() -> int:
    """Let this process open as many files as it may ever; returns how many."""
    with kernel_call("raise the limit of open files"):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
