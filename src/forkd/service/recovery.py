"""What a daemon does with what its predecessor left: adopt it, or reap it.

A sandbox is adopted if its row says that it runs and the process that the row names
listens at its control socket.  The seed to which it is reset stays as it is, or
is retired.  Whatever else is ours ends: processes that were told to live in our run folder,
cgroups and taps without a sandbox, folders without a row.  Nothing else can be left, because
a row is written before anything is made.

What cannot be ended or removed is logged and left to the next start: one process that survives
SIGKILL must not keep every sandbox without a daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from forkd.engine.control import Control
from forkd.engine.process import (
    CONFIG_OPTION,
    CONTROL_SOCKET,
    KILL_TIMEOUT_S,
    ZYGOTE_SOCKET,
    last_words,
)
from forkd.errors import EngineExited, EngineTimeout, ForkdError
from forkd.host import files, netlink, proc
from forkd.host.spawn import Process
from forkd.model.sandbox import SandboxState
from forkd.network import taps
from forkd.service import seeds
from forkd.service.leases import KEPT_FILES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from forkd.cgroups.tree import CgroupTree
    from forkd.network.plan import Plan
    from forkd.service.records import Records
    from forkd.service.settings import HostSettings
    from forkd.store.database import SandboxRow

T = TypeVar("T")

UNSEEN = "it ended while no daemon was running"
"""Why a sandbox has exited that nobody saw end."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What becomes of the rows: their sandboxes run, have exited, or go.

    Those that ended unseen are among those that have exited.
    """

    running: tuple[SandboxRow, ...]
    exited: tuple[SandboxRow, ...]
    ended: tuple[SandboxRow, ...]
    dropped: tuple[SandboxRow, ...]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of what an earlier daemon left.

    Attributes:
        kept: What is adopted: those that run, and those that have exited.
        ended: Of these, those that ended while no daemon was running.
        dropped: What is gone.
    """

    kept: tuple[SandboxRow, ...]
    ended: tuple[SandboxRow, ...]
    dropped: tuple[SandboxRow, ...]


@dataclass(frozen=True, slots=True)
class Recovery:
    """Adopts and reaps.

    Attributes:
        settings: Where things are.
        records: What is remembered.
        cgroups: Where limited sandboxes have their cgroups.
        network: Which taps are ours.
    """

    settings: HostSettings
    records: Records
    cgroups: CgroupTree
    network: Plan

    async def recover(self) -> Recovered:
        """Reap what is dead or half-made; return what became of each.

        Raises:
            StoreError: The database is damaged.
            HostError: The kernel does not let us look.
        """
        rows = await self.records.rows()
        found = await self._sort(rows)
        pids = {row.sandbox.pid for row in found.running if row.sandbox.pid is not None}
        await self._retire_zygotes()
        await end_processes(self.settings.run_dir, pids | seeds.retired_for(pids))
        left = await asyncio.to_thread(self._remove_leftovers, found)
        kept = found.running + found.exited
        gone = tuple(row for row in found.dropped if row.lease not in left)
        await self.records.remove(row.sandbox.id for row in gone)
        await self.records.put(kept)
        counts = {"running": len(found.running), "exited": len(found.exited), "dropped": len(gone)}
        log.info("recovered", extra=counts)
        return Recovered(kept, found.ended, gone)

    async def _sort(self, rows: Collection[SandboxRow]) -> Found:
        running, exited, ended, dropped = [], [], [], []
        for row in rows:
            match row.sandbox.state:
                case SandboxState.EXITED:
                    exited.append(row)
                case SandboxState.RUNNING | SandboxState.PAUSED:
                    directory = self.settings.sandboxes_dir / row.lease
                    if await _runs(row, directory):
                        running.append(row)
                    else:
                        ended.append(await asyncio.to_thread(_as_exited, row, directory))
                case SandboxState.STARTING | SandboxState.STOPPING:
                    dropped.append(row)
        return Found(tuple(running), (*exited, *ended), tuple(ended), tuple(dropped))

    async def _retire_zygotes(self) -> None:
        """Have every zygote end when nobody needs what it holds; who does not answer is no seed."""

        async def ask(folder: Path) -> None:
            with contextlib.suppress(ForkdError):
                async with await Control.connect(folder / ZYGOTE_SOCKET) as control:
                    await control.retire()

        folders = await asyncio.to_thread(files.entries, self.settings.zygotes_dir)
        await asyncio.gather(*(ask(folder) for folder in folders))

    def _remove_leftovers(self, found: Found) -> frozenset[str]:
        """Remove what belongs to no running sandbox; return the leases of which something is left.

        Blocks.
        """
        running = {str(row.lease) for row in found.running}
        exited = {str(row.lease) for row in found.exited}
        left: set[str] = set()
        for name in self.cgroups.names():
            if name not in running and not _done(self.cgroups.remove, name):
                left.add(name)
        indexes = (row.tap_index for row in found.running)
        used = {self.network.slot(index).tap for index in indexes if index is not None}
        _done(netlink.remove, taps.left_over(self.network, used))
        for parent in (self.settings.zygotes_dir, self.settings.bakes_dir):
            for folder in files.entries(parent):
                _done(files.remove_tree, folder)
        for folder in files.entries(self.settings.sandboxes_dir):
            remove = _keep_console if folder.name in exited else files.remove_tree
            if folder.name not in running and not _done(remove, folder):
                left.add(folder.name)
        return frozenset(left)


async def end_processes(run_dir: Path, adopted: Collection[int] = ()) -> list[int]:
    """End every process of ours that was not adopted: zygotes, bakes, half-made children.

    Returns:
        Those that were ended.  Others are logged.
    """
    strays = await asyncio.to_thread(_processes_of, run_dir)
    wanted = [pid for pid in strays if pid not in adopted]
    ended = await asyncio.gather(*(_end(pid, run_dir) for pid in wanted))
    return [pid for pid, has_ended in zip(wanted, ended, strict=True) if has_ended]


async def _end(pid: int, run_dir: Path) -> bool:
    try:
        process = Process.open(pid)
        if process is None:
            return False
        with process:
            # The pidfd is older than this second look, so it is the process we mean.
            if not _is_of(pid, run_dir):
                return False
            log.info("ending a stray process", extra={"pid": pid})
            process.kill()
            if await process.wait(KILL_TIMEOUT_S):
                return True
            log.error("a stray process survives SIGKILL", extra={"pid": pid})
    except ForkdError as error:
        log.warning("stray process not ended", extra={"pid": pid, "error": str(error)})
    return False


def _done(remove: Callable[[T], None], what: T) -> bool:
    """Remove something; return whether it worked, and log it if not."""
    try:
        remove(what)
    except ForkdError as error:
        log.warning("leftover not removed", extra={"what": str(what), "error": str(error)})
        return False
    return True


def _keep_console(folder: Path) -> None:
    files.remove_all_but(folder, KEPT_FILES)


async def _runs(row: SandboxRow, directory: Path) -> bool:
    """Whether the process that a row names still listens as that sandbox.

    Raises:
        CapacityError: The kernel does not let us look; nothing is known.
    """
    try:
        async with await Control.connect(directory / CONTROL_SOCKET) as control:
            return control.peer_pid() == row.sandbox.pid
    except (EngineExited, EngineTimeout):
        return False


def _as_exited(row: SandboxRow, directory: Path) -> SandboxRow:
    said = last_words(directory)
    reason = f"{UNSEEN}: {said}" if said else UNSEEN
    sandbox = replace(row.sandbox, state=SandboxState.EXITED, pid=None, exit_reason=reason)
    return replace(row, sandbox=sandbox, network_index=None, tap_index=None)


def _processes_of(run_dir: Path) -> list[int]:
    return [pid for pid in proc.processes() if _is_of(pid, run_dir)]


def _is_of(pid: int, run_dir: Path) -> bool:
    """Whether a process is a VMM that was told to live in our run folder, or a child of one."""
    return proc.has_option_below(pid, CONFIG_OPTION, run_dir)
