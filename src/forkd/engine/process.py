"""Start VMM processes: machines that boot, and zygotes.

A process is ours only once it has said on its standard output that it listens;
before that, whatever happens, it is killed and waited for.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forkd.engine.channel import Channel, deadline
from forkd.engine.configs import members
from forkd.engine.faults import control_fault
from forkd.engine.frames import Frame, Kind
from forkd.engine.replies import Compared
from forkd.errors import EngineError, EngineExited, ForkdError
from forkd.host import files, rlimits, spawn
from forkd.host.spawn import Process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from forkd.engine.configs import CompareConfig, MachineConfig, ZygoteConfig
    from forkd.model.json import JsonObject

CONFIG_FILE = "config.json"
CONFIG_OPTION = "--config"
NO_FILTER_OPTION = "--no-filter"
SHARE_CORES_OPTION = "--share-cores"
LOG_FILE = "vmm.log"
CONTROL_SOCKET = "control.sock"
ZYGOTE_SOCKET = "zygote.sock"
VSOCK_SOCKET = "vsock.sock"
CONSOLE_LOG = "console.log"

LISTEN_TIMEOUT_S = 300.0
"""How long a process may take to listen: a zygote reads and hashes gigabytes first."""

KILL_TIMEOUT_S = 30.0
"""How long the kernel may take to end a killed process with all its memory."""

LOG_TAIL_BYTES_MAX = 2_000
"""How much of the end of a process' log goes into the error that it caused."""

COMPARE_TIMEOUT_S = 600.0
"""How long a comparison of two disks may take: as long as it may use a processor."""

_LINE_BYTES_MAX = 16 * 1024 * 1024
"""Longest first line: a comparison's, whose paths have 2 MiB and may be escaped."""


async def start_machine(
    vmm: Path,
    config: MachineConfig,
    *,
    filtered: bool = True,
    own_cores: bool = True,
    cgroup: Path | None = None,
) -> Process:
    """Start a machine in `config.directory`; it boots from now on.

    Args:
        vmm: The VMM's program.
        config: The machine.
        filtered: As of `start_zygote`.
        own_cores: As of `start_zygote`.
        cgroup: The group that it is started in; None for the daemon's own.

    Raises:
        ForkdError: As `start_zygote`.
    """
    return await _start(vmm, "machine", config, _options(filtered, own_cores), cgroup=cgroup)


async def start_zygote(
    vmm: Path, config: ZygoteConfig, *, filtered: bool = True, own_cores: bool = True
) -> Process:
    """Start a zygote in `config.directory`; it has verified its snapshot and listens.

    Args:
        vmm: The VMM's program.
        config: The snapshot.
        filtered: Whether its threads, and those of its forks, may make only the system calls that
            they need.
        own_cores: Whether no other process runs on the core of one of its forks meanwhile, where
            the kernel can do that.

    Raises:
        HostError: The program could not be started, or the kernel refused it.
        StoreError: A file of the snapshot is damaged, too new, or for another CPU.
        EngineExited: The process ended without a word.
        EngineTimeout: It did not listen within `LISTEN_TIMEOUT_S`.
    """
    return await _start(vmm, "zygote", config, _options(filtered, own_cores))


async def compare(vmm: Path, config: CompareConfig, directory: Path) -> Compared:
    """Compare the files of two disks, in a process that may do nothing else.

    Args:
        vmm: The VMM's program.
        config: The disks.
        directory: Where the process has its configuration and its log.

    Raises:
        GuestError: One of them has no file system that can be compared.
        StoreError: A layer is missing or damaged.
        EngineTimeout: It was not done within `COMPARE_TIMEOUT_S`.
        ForkdError: As `start_zygote`.
    """
    process, said = await _first_said(
        vmm, "compare", config, _Place(directory, COMPARE_TIMEOUT_S, "compared")
    )
    with process:
        await end(process)
    return Compared.read(said, "compare")


async def end(process: Process, ask: Callable[[], Awaitable[object]] | None = None) -> None:
    """End a process: ask it if there is a way, then kill it; returns when it is gone.

    Raises:
        EngineError: The kernel did not end it within `KILL_TIMEOUT_S`.
    """
    if ask is not None:
        try:
            await ask()
        except ForkdError:
            pass  # it could not be asked; it will be killed
        else:
            if await process.wait(KILL_TIMEOUT_S):
                return
    process.kill()
    if not await process.wait(KILL_TIMEOUT_S):
        raise EngineError(f"process {process.pid} survives SIGKILL", pid=process.pid)


async def listener(socket: Path) -> Process:
    """Return the process that listens at a socket of ours, as the kernel knows it.

    A number that a VMM has told may be any process's: one that was taken over would have us end
    whatever it names.

    Raises:
        EngineExited: Nothing listens there.
        ForkdError: The kernel does not let us look.
    """
    async with await Channel.connect(socket) as channel:
        pid = channel.peer_pid()
        process = Process.open(pid)
    if process is None:
        raise EngineExited(f"process {pid}, which listened at {socket}, ended at once", pid=pid)
    return process


async def end_listener(socket: Path) -> None:
    """End whatever process listens at a socket of ours; none is fine.

    Raises:
        EngineError: The kernel did not end it within `KILL_TIMEOUT_S`.
    """
    try:
        process = await listener(socket)
    except EngineExited:
        return
    with process:
        await end(process)


async def _start(
    vmm: Path,
    role: Literal["machine", "zygote"],
    config: MachineConfig | ZygoteConfig,
    options: tuple[str, ...],
    *,
    cgroup: Path | None = None,
) -> Process:
    place = _Place(config.directory, LISTEN_TIMEOUT_S, "listening", options, cgroup)
    process, _ = await _first_said(vmm, role, config, place)
    return process


def _options(filtered: bool, own_cores: bool) -> tuple[str, ...]:  # noqa: FBT001 - private
    """Return what a command line ends with, in the order in which the VMM takes it."""
    without_cores = () if own_cores else (SHARE_CORES_OPTION,)
    return without_cores + (() if filtered else (NO_FILTER_OPTION,))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where and how a process works, and what it is to say first, in what time."""

    directory: Path
    timeout_s: float
    event: str
    options: tuple[str, ...] = ()
    cgroup: Path | None = None


async def _first_said(
    vmm: Path,
    role: Literal["machine", "zygote", "compare"],
    config: MachineConfig | ZygoteConfig | CompareConfig,
    place: _Place,
) -> tuple[Process, JsonObject]:
    """Start a process, and return it with the first line that it says."""
    config_path = place.directory / CONFIG_FILE
    log = place.directory / LOG_FILE
    await asyncio.to_thread(
        files.write_atomic, config_path, json.dumps(members(config)).encode(), mode=0o600
    )
    limits = rlimits.COMPARER if role == "compare" else rlimits.VMM
    command = [vmm, role, CONFIG_OPTION, config_path, *place.options]
    process, stdout = spawn.start(command, log=log, limits=limits, cgroup=place.cgroup)
    try:
        async with deadline(place.timeout_s, f"the {role} did not report {place.event!r}"):
            line = await stdout.line(_LINE_BYTES_MAX)
        process.drain_log()
        said = _check_said(role, line, place)
    except BaseException:
        with process:
            process.kill()
            await process.wait(KILL_TIMEOUT_S)
        raise
    finally:
        stdout.close()
    return process, said


def _check_said(role: str, line: bytes, place: _Place) -> JsonObject:
    """Return what a process has said, if that is what it was to say."""
    said: JsonObject | None
    try:
        said = Frame(Kind.EVENT, line).members()
    except EngineError:
        said = None
    match said:
        case {"event": event} if said is not None and event == place.event:
            return said
        case {"event": "failed"} if said is not None:
            raise control_fault(said)
    log = log_tail(place.directory / LOG_FILE)
    raise EngineExited(f"the {role} ended before it was {place.event}: {log}")


def log_tail(log: Path) -> str:
    """Return the end of a log for an error's message, or that there is nothing in it.  Blocks."""
    return _tail(log) or "it logged nothing"


def last_words(directory: Path) -> str:
    """Return why the machine in a folder said that it ended; empty if it could not.  Blocks."""
    return _tail(directory / LOG_FILE).rpartition("\n")[2]


def _tail(log: Path) -> str:
    try:
        said = files.read_foreign(log, LOG_TAIL_BYTES_MAX, end=True) or b""
    except ForkdError:  # no more is known of a process that put something else there
        return ""
    return said.decode(errors="replace").strip()
