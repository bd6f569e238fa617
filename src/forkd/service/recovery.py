"""What a daemon does with what its predecessor left: adopt it, or reap it.

A sandbox is adopted if its row says that it runs and the process that the row names
listens at its control socket.  The seed that holds what it goes back to stays as it is, or
is retired.  Whatever else is ours ends: processes that were told to live in our run folder,
cgroups and taps without a sandbox, folders without a row.  Nothing else can be left, because
a row is written before anything is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forkd.engine.control import Control
from forkd.engine.process import (
    CONFIG_OPTION,
    CONTROL_SOCKET,
    KILL_TIMEOUT_S,
    ZYGOTE_SOCKET,
    last_words,
)
from forkd.errors import EngineError, ForkdError, HostError
from forkd.host import files, netlink, proc
from forkd.host.spawn import Process
from forkd.model.sandbox import SandboxState
from forkd.network import taps
from forkd.service import seeds
from forkd.service.resources import KEPT_FILES

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from forkd.service.resources import Resources
    from forkd.service.settings import HostSettings
    from forkd.store.database import Database, SandboxRow

UNSEEN = "it ended while no daemon was running"
"""Why a sandbox has exited that nobody saw end."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What becomes of the rows: their sandboxes run, have exited, or go."""

    running: tuple[SandboxRow, ...]
    exited: tuple[SandboxRow, ...]
    dropped: tuple[SandboxRow, ...]


async def recover(
    settings: HostSettings, database: Database, resources: Resources
) -> tuple[SandboxRow, ...]:
    """Reap what is dead or half-made; return the rows of what is adopted.

    Raises:
        StoreError: The database is damaged.
        HostError: The kernel refused to end or remove something.
    """
    rows = await asyncio.to_thread(database.rows)
    found = await _sort(rows, resources)
    pids = {row.sandbox.pid for row in found.running if row.sandbox.pid is not None}
    await _retire(settings.zygotes_dir)
    await _end_strays(settings.run_dir, pids | seeds.held_for(pids))
    await asyncio.to_thread(_remove_leftovers, settings, resources, found)
    kept = found.running + found.exited
    await asyncio.to_thread(database.remove, [row.sandbox.id for row in found.dropped])
    await asyncio.to_thread(database.put, kept)
    log.info(
        "recovered",
        extra={
            "running": len(found.running),
            "exited": len(found.exited),
            "dropped": len(found.dropped),
        },
    )
    return kept


async def _sort(rows: Collection[SandboxRow], resources: Resources) -> Found:
    running, exited, dropped = [], [], []
    for row in rows:
        match row.sandbox.state:
            case SandboxState.EXITED:
                exited.append(row)
            case SandboxState.RUNNING:
                directory = resources.directory(row.place)
                if await _runs(row, directory):
                    running.append(row)
                else:
                    exited.append(await asyncio.to_thread(_as_exited, row, directory))
            case SandboxState.STARTING | SandboxState.STOPPING:
                dropped.append(row)
    return Found(tuple(running), tuple(exited), tuple(dropped))


async def _runs(row: SandboxRow, directory: Path) -> bool:
    """Whether the process that a row names still listens as that sandbox."""
    try:
        async with await Control.connect(directory / CONTROL_SOCKET) as control:
            return control.peer_pid() == row.sandbox.pid
    except EngineError:
        return False


def _as_exited(row: SandboxRow, directory: Path) -> SandboxRow:
    said = last_words(directory)
    reason = f"{UNSEEN}: {said}" if said else UNSEEN
    sandbox = replace(row.sandbox, state=SandboxState.EXITED, pid=None, exit_reason=reason)
    return replace(row, sandbox=sandbox, network_index=None, tap_index=None)


async def _retire(zygotes_dir: Path) -> None:
    """Have every zygote end when nobody needs what it holds; who does not answer is no seed."""

    async def ask(folder: Path) -> None:
        with contextlib.suppress(ForkdError):
            async with await Control.connect(folder / ZYGOTE_SOCKET) as control:
                await control.retire()

    folders = await asyncio.to_thread(lambda: tuple(zygotes_dir.iterdir()))
    await asyncio.gather(*(ask(folder) for folder in folders))


async def _end_strays(run_dir: Path, adopted: Collection[int]) -> None:
    """End every process of ours that was not adopted: zygotes, bakes, half-made children."""
    for pid in await asyncio.to_thread(_processes_of, run_dir):
        process = Process.open(pid) if pid not in adopted else None
        if process is None:
            continue
        with process:
            # The pidfd is older than this second look, so it is the process we mean.
            if not _is_of(pid, run_dir):
                continue
            log.info("ending a stray process", extra={"pid": pid})
            process.kill()
            if not await process.wait(KILL_TIMEOUT_S):
                raise HostError(f"process {pid} survives SIGKILL", pid=pid)


def _processes_of(run_dir: Path) -> list[int]:
    return [pid for pid in proc.processes() if _is_of(pid, run_dir)]


def _is_of(pid: int, run_dir: Path) -> bool:
    """Whether a process is a VMM that was told to live in our run folder, or a child of one."""
    return proc.has_option_below(pid, CONFIG_OPTION, run_dir)


def _remove_leftovers(settings: HostSettings, resources: Resources, found: Found) -> None:
    """Remove what belongs to no running sandbox; blocks."""
    running = {str(row.place) for row in found.running}
    exited = {str(row.place) for row in found.exited}
    for name in resources.cgroups.names():
        if name not in running:
            resources.cgroups.remove(name)
    plan = settings.network
    used = {plan.slot(r.tap_index).tap for r in found.running if r.tap_index is not None}
    for tap in taps.left_over(plan, used):
        netlink.remove(tap)
    try:
        for parent in (settings.zygotes_dir, settings.bakes_dir):
            for folder in parent.iterdir():
                files.remove_tree(folder)
        for folder in settings.sandboxes_dir.iterdir():
            if folder.name in exited:
                _keep_only_console(folder)
            elif folder.name not in running:
                files.remove_tree(folder)
    except OSError as error:
        raise HostError(f"cannot remove {error.filename}: {error.strerror}") from error


def _keep_only_console(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name not in KEPT_FILES:
            files.remove_tree(entry)
