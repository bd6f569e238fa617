"""Which process of a daemon is what, and what on its host belongs to nobody.

A VMM process is known by the sockets that it listens at, since whatever a zygote forks has its
command line: `control.sock` makes a machine, `zygote.sock` a zygote, or a seed if a machine is
its parent.  What has a file in the staging folder open and listens nowhere writes a snapshot.
A retired seed is no process of its own, but a part of the machines that go back to it; one that
has outlived them all is one of the others.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.cgroups.tree import ZYGOTES
from forkd.host import cgroupfs, proc

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from forkd.wire import v2
    from tests.support.real_daemon import Daemon

_LISTENING, _CONNECTED = "01", "03"


@dataclass(frozen=True, slots=True)
class Census:
    """The VMM processes of one daemon at one moment, by number.

    Attributes:
        machines: Those of sandboxes, with the names of their folders.
        zygotes: Those of snapshots, with the names of their folders.
        seeds: What running machines have left of themselves, likewise.
        writers: Those that write a snapshot.
        others: Those on their way to be one of these, or to their end.
    """

    machines: dict[int, str] = field(default_factory=dict)
    zygotes: dict[int, str] = field(default_factory=dict)
    seeds: dict[int, str] = field(default_factory=dict)
    writers: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the kernel says of a process: its parent, its sockets' inodes, its open files."""

    parent: int
    sockets: frozenset[str]
    files: tuple[str, ...]


def take(daemon: Daemon) -> Census:
    """Look at every VMM process of a daemon."""
    found = {pid: seen for pid in daemon.vmm_processes() if (seen := _look(pid)) is not None}
    listening = dict(_sockets(daemon, _LISTENING))
    census = Census()
    for pid, seen in found.items():
        above = found.get(seen.parent)
        inherited = frozenset() if above is None else above.sockets
        own = [listening[each] for each in (seen.sockets - inherited) & listening.keys()]
        _sort(census, pid, own, seen, staging=str(daemon.state / "staging"))
    for pid in [each for each in census.zygotes if found[each].parent in census.machines]:
        census.seeds[pid] = census.zygotes.pop(pid)
    return census


def _sort(census: Census, pid: int, own: list[Path], seen: _Found, *, staging: str) -> None:
    folders = {path.name: path.parent.name for path in own}
    if "control.sock" in folders:
        census.machines[pid] = folders["control.sock"]
    elif "zygote.sock" in folders:
        census.zygotes[pid] = folders["zygote.sock"]
    elif any(staging in path for path in seen.files):  # in a jail its root is before it
        census.writers.add(pid)
    else:
        census.others.add(pid)


def _look(pid: int) -> _Found | None:
    # By `os`, four times as fast as `Path`: what writes a snapshot lives about as long as a census.
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            open_ = [entry.path for entry in entries]
    except OSError:
        return None  # it has ended
    parent, links = proc.parent(pid), []
    for path in open_:
        with contextlib.suppress(OSError):  # it has closed this one meanwhile
            links.append(os.readlink(path))  # noqa: PTH115 - see above
    if parent is None:
        return None
    sockets = (link[8:-1] for link in links if link.startswith("socket:["))
    return _Found(parent, frozenset(sockets), tuple(links))


def _sockets(daemon: Daemon, state: str) -> Iterator[tuple[str, Path]]:
    """Yield the sockets with a path below a daemon's run folder that are in a state, by inode.

    The kernel lists those of one network namespace.  Each zygote has its own, but the end of a
    connection that it accepted is in that of whoever connected.
    """
    for line in _unix_sockets({os.getpid(), *daemon.vmm_processes()}):
        fields = line.split()
        if len(fields) == 8 and fields[5] == state:
            path = Path(fields[7])
            if path.is_relative_to(daemon.run_dir):
                yield fields[6], path


def _unix_sockets(pids: Collection[int]) -> Iterator[str]:
    """Yield a line for each Unix socket in the network namespaces of processes."""
    seen: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            namespace = os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115 - as above
            if namespace not in seen:
                lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
                seen.add(namespace)
                yield from lines


def untrue(daemon: Daemon, listed: Collection[v2.SandboxInfo]) -> list[str]:
    """Return a line for everything on the host that is not as a daemon at rest says."""
    running = {each.id: each for each in listed if each.status == "running"}
    kept = {each.id for each in listed if each.status == "exited"}
    strange = [f"{each.id} is {each.status}" for each in listed if each.id not in {*running, *kept}]
    return [*strange, *_processes(daemon, running), *_files(daemon, running, kept)]


def _processes(daemon: Daemon, running: dict[str, v2.SandboxInfo]) -> Iterator[str]:
    """Yield what is wrong with the processes: a machine is listed, a zygote the daemon's."""
    census = take(daemon)
    said = {each.pid: id_ for id_, each in running.items()}
    for pid, folder in census.machines.items():
        if said.get(pid) != folder:
            yield f"process {pid} is the machine of {folder}, which is listed as {said.get(pid)}"
    yield from (f"{said[pid]} has no process {pid}" for pid in said if pid not in census.machines)
    held = {path.parent.name for _, path in _sockets(daemon, _CONNECTED)}
    for pid, folder in census.zygotes.items():
        if folder not in held:
            yield f"process {pid} is a zygote in {folder} that nobody holds"
    for name in ("seeds", "writers", "others"):
        yield from (f"process {pid} is one of the {name}" for pid in getattr(census, name))
    folders = {entry.name for entry in daemon.settings.zygotes_dir.iterdir()}
    if folders != set(census.zygotes.values()):
        yield f"folders of zygotes are {folders}, not {set(census.zygotes.values())}"


def _files(daemon: Daemon, running: dict[str, v2.SandboxInfo], kept: set[str]) -> Iterator[str]:
    """Yield what is wrong with folders, cgroups and taps."""
    settings = daemon.settings
    folders = {entry.name for entry in settings.sandboxes_dir.iterdir()}
    if not running.keys() <= folders <= running.keys() | kept:
        yield f"folders of sandboxes are {folders}, not {set(running)}"
    for folder in (settings.bakes_dir, daemon.state / "staging"):
        yield from (f"{entry} is left over" for entry in folder.iterdir())
    limited = {id_ for id_, each in running.items() if each.memory_limit_mib is not None}
    groups = set(cgroupfs.children(daemon.names.cgroup_root)) - {ZYGOTES}
    if groups != limited:
        yield f"cgroups are {groups}, not {limited}"
    prefix = daemon.names.network.tap_prefix
    taps = [path for path in Path("/sys/class/net").iterdir() if path.name.startswith(prefix)]
    if len(taps) != sum(each.guest_addr is not None for each in running.values()):
        yield f"taps are {[tap.name for tap in taps]}"
