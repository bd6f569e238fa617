"""What /proc says: memory, CPUs, processes, limits."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from forkd.errors import HostError

_PROC = Path("/proc")
_KIB = 1024


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU's name and features, in the kernel's words."""

    model: str
    features: tuple[str, ...]


def cpu() -> Cpu:
    """Return what the first CPU is; all of a host's are alike to us."""
    fields: dict[str, str] = {}
    for line in (_PROC / "cpuinfo").read_text().splitlines():
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
    for line in (_PROC / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * _KIB
    try:
        return fields["MemTotal"], fields["MemAvailable"]
    except KeyError as error:
        raise HostError(f"/proc/meminfo does not have {error}") from error


def processes() -> tuple[int, ...]:
    """Return every process."""
    return tuple(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def has_option_below(pid: int, option: str, folder: Path) -> bool:
    """Whether a process was started with `option` and, after it, a path below `folder`."""
    words = _arguments(_PROC / str(pid))
    prefix = os.fsencode(folder) + b"/"
    return any(
        name == option.encode() and value.startswith(prefix) for name, value in pairwise(words)
    )


def _arguments(process: Path) -> list[bytes]:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []  # it has ended meanwhile


def raise_open_files_limit() -> int:
    """Let this process open as many files as it may ever; returns how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
