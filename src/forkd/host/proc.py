"""What /proc says: memory, CPUs, processes, limits."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from forkd.errors import HostError
from forkd.host.faults import kernel_call

_PROC = Path("/proc")
_KIB = 1024


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


def memory_bytes() -> tuple[int, int]:
    """Return the host's memory and how much of it could be given out now.

    Raises:
        HostError: The kernel does not say.
    """
    fields: dict[str, int] = {}
    for line in _text(_PROC / "meminfo").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * _KIB
    try:
        return fields["MemTotal"], fields["MemAvailable"]
    except KeyError as error:
        raise HostError(f"/proc/meminfo does not have {error}") from error


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
    words = _arguments(_PROC / str(pid))
    prefix = os.fsencode(folder) + b"/"
    return any(
        name == option.encode() and value.startswith(prefix) for name, value in pairwise(words)
    )


def name(pid: int) -> str:
    """Return what a process calls itself; empty if it is gone."""
    try:
        return (_PROC / str(pid) / "comm").read_text().rstrip("\n")
    except OSError:
        return ""


def parent(pid: int) -> int | None:
    """Return the process that another is a child of; None if it is gone."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    _state, above, *_ = stat.rpartition(")")[2].split()
    return int(above)


def _arguments(process: Path) -> list[bytes]:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []  # it has ended meanwhile


def anonymous_bytes(pid: int) -> int:
    """Return the memory that a process does not share with a file; 0 if it is gone.

    Cheap, and at least what `private_bytes` returns.
    """
    try:
        resident, shared = (_PROC / str(pid) / "statm").read_text().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def private_bytes(pid: int) -> int | None:
    """Return the memory that nobody shares with a process; None if it is gone.

    The kernel walks the whole process for this: milliseconds, not microseconds.
    """
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    names = ("Private_Clean", "Private_Dirty", "Private_Hugetlb")
    return sum(int(fields[name].split()[0]) for name in names if name in fields) * _KIB


def raise_open_files_limit() -> int:
    """Let this process open as many files as it may ever; returns how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
