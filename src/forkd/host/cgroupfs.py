"""The cgroup v2 file system: make a group, write its files, end it.

Nothing is swallowed: a limit that cannot be set is an error, so that no sandbox
runs without a limit that it was given.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import ForkdError, HostError
from forkd.host import tunables
from forkd.host.faults import host_error, kernel_call

if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from io import FileIO

PROCESSES = "cgroup.procs"
"""The file of a group that names its processes, and by which one enters it."""

_ENTERED = 0o664
"""Mode of that file in a cgroup that others than its owner may have processes born in."""

PROC = Path("/proc")

CGROUP_ROOT = Path("/sys/fs/cgroup")
"""Where cgroup v2 is mounted on every host with systemd, and in the helper machine."""


def controllers(group: Path) -> frozenset[str]:
    """Return the controllers that `group` may pass on; empty where there is no cgroup v2.

    Raises:
        CapacityError: There are too many open files, or too little memory.
        HostError: The kernel does not say.
    """
    with kernel_call(f"look at the cgroup {group}"):
        try:
            return frozenset((group / "cgroup.controllers").read_text().split())
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()


def is_ours(group: Path) -> bool:
    """Whether we may make groups in one: it is root's, unless it was delegated to us."""
    return os.access(group / "cgroup.subtree_control", os.W_OK)


def is_top(group: Path) -> bool:
    """Whether a group is the hierarchy's own: it alone may have processes and pass on controllers.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst, "No Internal Process Constraint".
    """
    return not (group / "cgroup.events").exists()


def processes(group: Path) -> frozenset[int]:
    """Return the processes that are in a group itself.

    Raises:
        HostError: There is no such group, or the kernel does not say.
    """
    with kernel_call(f"list the processes of {group}"):
        return frozenset(map(int, (group / PROCESSES).read_text().split()))


def own() -> Path | None:
    """Return the group that we are in; None where there is no cgroup v2.

    Raises:
        HostError: As `controllers`.
    """
    return _group_of("self")


def of_container() -> Path | None:
    """Return our own group if the first process that we see is in it, too; None otherwise.

    So it is in a container, whose processes share one group.  A service manager has a group of its
    own, apart from those of its services.

    Raises:
        HostError: As `controllers`.
    """
    group = own()
    return group if group == _group_of("1") else None


def _group_of(process: str) -> Path | None:
    with kernel_call(f"look at the cgroup of process {process}"):
        lines = (PROC / process / "cgroup").read_text().splitlines()
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return CGROUP_ROOT / paths[0] if paths else None


def remove_empty(group: Path) -> None:
    """Remove a group that never had a process.

    Raises:
        HostError: The kernel refused.
    """
    with kernel_call(f"remove the cgroup {group}"):
        group.rmdir()


def make(group: Path) -> None:
    """Make one group; one that exists is fine.

    Raises:
        HostError: The kernel refused.
    """
    with kernel_call(f"make the cgroup {group}"):
        group.mkdir(exist_ok=True)


def make_limited(
    group: Path,
    limits: Iterable[tuple[str, str]],
    default: Container[tuple[str, str]] = (),
    entered_by: int | None = None,
) -> None:
    """Make one group and write files of it, or nothing; one that exists is fine.

    Each child of a fork waits for this: the path is walked once and not for each file.

    Args:
        group: Which.
        limits: The files, and what is written to them.
        default: What need not be written to a new group, as the kernel has.
        entered_by: As `let_in`.

    Raises:
        HostError: The kernel refused.
    """
    path = str(group)
    with kernel_call(f"make the cgroup {path}"):
        try:
            os.mkdir(path)  # noqa: PTH102 - a `Path` for each child of a fork is dear
        except FileExistsError:
            default = ()
    try:
        with kernel_call(f"open the cgroup {path}"):
            folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for limit in limits:
                if limit not in default:
                    _write_at(folder, path, *limit)
            if entered_by is not None:
                _let_in(folder, path, entered_by)
        finally:
            os.close(folder)
    except ForkdError:
        remove_empty(group)
        raise


def let_in(group: Path, users: int) -> None:
    """Let a group of users have processes be born in a cgroup.

    The kernel asks for that right twice: in the cgroup where a process is to be, and in the lowest
    one that has both that and where its parent is.

    Raises:
        HostError: The kernel refused.
    """
    with kernel_call(f"open the cgroup {group}"):
        folder = os.open(group, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _let_in(folder, str(group), users)
    finally:
        os.close(folder)


def _let_in(folder: int, path: str, users: int) -> None:
    with kernel_call(f"let group {users} into the cgroup {path}"):
        os.chown(PROCESSES, -1, users, dir_fd=folder)
        os.chmod(PROCESSES, _ENTERED, dir_fd=folder)


def _write_at(folder: int, path: str, file: str, value: str) -> None:
    try:
        tunables.write(file, value, dir_fd=folder)
    except OSError as error:
        raise host_error(f"set {path}/{file} to {value}", error) from error


def write(group: Path, file: str, value: str) -> None:
    """Write one file of a group.

    Raises:
        HostError: The kernel refused, or has no such file.
    """
    path = group / file
    with kernel_call(f"set {path} to {value}"):
        tunables.write(path, value)


def enter(group: Path, pid: int) -> None:
    """Move a process to a group; one that has ended is fine.

    Raises:
        HostError: The kernel refused.
    """
    with contextlib.suppress(ProcessLookupError):
        write(group, PROCESSES, str(pid))


def memory_limit(group: Path) -> tuple[int, int] | None:
    """Return a group's memory limit in bytes, and how much of it is left; None without a limit.

    Cached contents of files that nobody used lately count as left: the kernel takes them back
    before it refuses memory.  Source: `memory.max`, `memory.current` and `inactive_file` of the
    kernel's Documentation/admin-guide/cgroup-v2.rst.

    Raises:
        CapacityError: There are too many open files, or too little memory.
        HostError: The kernel does not say.
    """
    with kernel_call(f"look at the memory of {group}"):
        try:
            limit = (group / "memory.max").read_text().strip()
        except FileNotFoundError:  # the hierarchy's own group, or one without the controller
            return None
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        lines = map(str.split, (group / "memory.stat").read_text().splitlines())
        unused = next((int(value) for name, value in lines if name == "inactive_file"), 0)
    return int(limit), max(int(limit) - used + unused, 0)


def memory_limits(group: Path) -> list[tuple[int, int]]:
    """Return `memory_limit` of a group and of each above it, innermost first, as far as we see.

    In a container, the outermost is the container's.

    Raises:
        HostError: As `memory_limit`.
    """
    groups = [each for each in (group, *group.parents) if each.is_relative_to(CGROUP_ROOT)]
    return [limit for each in groups if (limit := memory_limit(each)) is not None]


def memory_bytes(group: Path) -> int | None:
    """Return what the kernel counts against a group's memory limit; None if there is no group."""
    try:
        return int((group / "memory.current").read_text())
    except OSError:
        return None


def memory_events(group: Path) -> dict[str, int]:
    """Return a group's counted memory events; empty if there is no group.

    `oom`: it was at its limit and nothing could be taken from it.  `oom_kill`: a process in it was
    killed by the OOM killer, for its own limit or the host's.  Source: the kernel's
    Documentation/admin-guide/cgroup-v2.rst.
    """
    try:
        lines = (group / "memory.events").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(count) for name, count in (line.split() for line in lines)}


def io_max(group: Path) -> str:
    """Return the limits of I/O of a group, a line for each disk; empty without any, or a group."""
    try:
        return (group / "io.max").read_text()
    except OSError:
        return ""


def io_stat(group: Path, disk: str) -> dict[str, int] | None:
    """Return what a group had of a disk, in the kernel's words; None if that is not counted.

    `rbytes` and `wbytes` were read and written, by `rios` and `wios` operations.  Source: the
    kernel's Documentation/admin-guide/cgroup-v2.rst.
    """
    try:
        lines = (group / "io.stat").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, *counts = line.split()
        if name == disk:
            fields = (each.partition("=") for each in counts)
            return {word: int(count) for word, _, count in fields if count.isdecimal()}
    return {}


def end(group: Path, timeout_s: float) -> None:
    """Kill every process in a group and remove it; one that does not exist is fine.

    Raises:
        HostError: A process did not end within `timeout_s`, or the kernel refused.
    """
    with kernel_call(f"remove the cgroup {group}"), contextlib.suppress(FileNotFoundError):
        with (group / "cgroup.events").open("rb", buffering=0) as events:
            write(group, "cgroup.kill", "1")
            _wait_until_empty(events, group, timeout_s)
        group.rmdir()


def _wait_until_empty(events: FileIO, group: Path, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(events, select.POLLPRI)
    until = time.monotonic() + timeout_s
    while b"populated 1" in events.read():
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise HostError(f"a process in {group} survives SIGKILL for {timeout_s:g} s")
        poll.poll(left_s * 1_000)
        events.seek(0)


def children(group: Path) -> tuple[str, ...]:
    """Return the names of the groups directly in `group`; none if it does not exist."""
    with kernel_call(f"list {group}"):
        try:
            with os.scandir(group) as entries:
                return tuple(sorted(entry.name for entry in entries if entry.is_dir()))
        except FileNotFoundError:
            return ()
