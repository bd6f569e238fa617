"""Start VMM processes: machines that boot, and zygotes.

A process is ours only once it has said on its standard output that it listens;
before that, whatever happens, it is killed and waited for.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Literal

from forkd.engine.channel import Channel, deadline
from forkd.engine.configs import members
from forkd.engine.faults import control_fault
from forkd.errors import EngineError, EngineExited
from forkd.host import spawn
from forkd.host.files import write_atomic
from forkd.host.spawn import Process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from forkd.engine.configs import MachineConfig, ZygoteConfig

CONFIG_FILE = "config.json"
CONFIG_OPTION = "--config"
LOG_FILE = "vmm.log"
CONTROL_SOCKET = "control.sock"
ZYGOTE_SOCKET = "zygote.sock"
VSOCK_SOCKET = "vsock.sock"
CONSOLE_LOG = "console.log"

LISTEN_TIMEOUT_S = 300.0
"""How long a process may take to listen: a zygote reads and hashes gigabytes first."""

KILL_TIMEOUT_S = 30.0
"""How long the kernel may take to end a killed process with all its memory."""

LOG_TAIL_BYTES = 2_000
"""How much of a process' log goes into the error that it caused."""

_LINE_BYTES_MAX = 64 * 1024


async def start_machine(vmm: Path, config: MachineConfig) -> Process:
    """Start a machine in `config.directory`; it boots from now on.

    Raises:
        ForkdError: As `start_zygote`.
    """
    return await _start(vmm, "machine", config)


async def start_zygote(vmm: Path, config: ZygoteConfig) -> Process:
    """Start a zygote in `config.directory`; it has verified its snapshot and listens.

    Raises:
        HostError: The program could not be started, or the kernel refused it.
        StoreError: A file of the snapshot is damaged, too new, or for another CPU.
        EngineExited: The process ended without a word.
        EngineTimeout: It did not listen within `LISTEN_TIMEOUT_S`.
    """
    return await _start(vmm, "zygote", config)


async def end(process: Process, ask: Callable[[], Awaitable[object]] | None = None) -> None:
    """End a process: ask it if there is a way, then kill it; returns when it is gone.

    Raises:
        EngineError: The kernel did not end it within `KILL_TIMEOUT_S`.
    """
    if ask is not None:
        try:
            await ask()
        except EngineError:
            pass  # it could not be asked; it will be killed
        else:
            if await process.wait(KILL_TIMEOUT_S):
                return
    process.kill()
    if not await process.wait(KILL_TIMEOUT_S):
        raise EngineError(f"process {process.pid} survives SIGKILL", pid=process.pid)


async def end_listener(socket: Path) -> None:
    """End whatever process listens at a socket of ours; none is fine.

    Raises:
        EngineError: The kernel did not end it within `KILL_TIMEOUT_S`.
    """
    try:
        channel = await Channel.connect(socket)
    except EngineExited:
        return
    async with channel:
        process = Process.open(channel.peer_pid())
    if process is not None:
        with process:
            await end(process)


async def _start(
    vmm: Path, role: Literal["machine", "zygote"], config: MachineConfig | ZygoteConfig
) -> Process:
    config_path = config.directory / CONFIG_FILE
    log = config.directory / LOG_FILE
    write_atomic(config_path, json.dumps(members(config)).encode(), mode=0o600)
    process, stdout = spawn.start([vmm, role, CONFIG_OPTION, config_path], log=log)
    try:
        async with deadline(LISTEN_TIMEOUT_S, f"the {role} did not begin to listen"):
            line = await _first_line(stdout)
        _check_listens(role, line, log)
    except BaseException:
        process.kill()
        await process.wait(KILL_TIMEOUT_S)
        process.close()
        raise
    return process


async def _first_line(descriptor: int) -> bytes:
    """Return the first line that comes out of a pipe, or what comes before its end; closes it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        return await reader.readline()
    except ValueError as error:
        raise EngineError("a VMM process wrote no line but more") from error
    finally:
        transport.close()


def _check_listens(role: str, line: bytes, log: Path) -> None:
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    match said:
        case {"event": "listening"}:
            return
        case {"event": "failed", "code": str(code), "message": str(message)}:
            raise control_fault(code, message)
    raise EngineExited(f"the {role} ended before it listened: {log_tail(log)}")


def log_tail(log: Path) -> str:
    """Return the end of a log for an error's message; a missing one is empty."""
    try:
        text = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
    except OSError:
        text = ""
    return text or "it logged nothing"
