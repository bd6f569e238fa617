"""How two machines differ: their files, from the layers of their disks, and pages of memory.

What a guest has written is in its caches until its kernel writes it out, so a disk is not read
behind a running guest's back.  A copy is made of each machine, a sibling of a sandbox or a fork of
a snapshot; the copy's guest writes everything out and freezes its file system, and what its disk
has above the layers that both have is written down.  Then the copies are deleted, and a process
that may do nothing else compares the two (`forkd-vmm compare`): a file whose blocks are in
the common layers is the same, and is not read.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkd.engine import process
from forkd.engine.configs import CompareConfig
from forkd.engine.control import Control
from forkd.errors import Conflict
from forkd.host import ownership, pages
from forkd.limits import DIFF_CHANGES_MAX, DIFF_ENTRIES_MAX, DIFFS_MAX, LONG_RETRY_S
from forkd.model.caller import Scope
from forkd.model.diff import Change, Difference, FileChange
from forkd.model.ids import SandboxId, Tag, is_sandbox_id
from forkd.model.sandbox import BranchOptions, ForkOptions
from forkd.service import folders
from forkd.service.chain_files import load_chain
from forkd.service.places import Places
from forkd.service.snapshots.disclosure import called
from forkd.service.staging import staged_folder
from forkd.service.supervision import to_end
from forkd.service.use_case import use_case

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from forkd.engine.configs import DiskConfig
    from forkd.engine.guest import Guest
    from forkd.engine.replies import Compared
    from forkd.model.caller import Caller
    from forkd.service.jail import Jail
    from forkd.service.sandboxes.component import Sandboxes
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.trees.branches import Branches
    from forkd.service.workers import Workers
    from forkd.store.snapshots import SnapshotStore
    from forkd.telemetry.telemetry import Telemetry

MEMORY_NAME = "forkd-memory"
"""What the VMM calls the file in memory that guests' memory is mapped of."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of a machine that is deleted after the comparison.

    Attributes:
        control: Its control socket.
        guest: Its agent.
        pid: The process whose memory is compared: the machine's itself, if it runs.
        uid: The user that it is; None for the daemon's.
    """

    control: Path
    guest: Guest
    pid: int | None
    uid: int | None


@dataclass(frozen=True, slots=True)
class Comparisons:
    """Compares machines; `forkd.service.api_trees.Comparisons` documents what a caller may ask.

    Attributes:
        vmm: The VMM's program.
        store: Where snapshots are, and the copies' layers meanwhile.
        catalog: Which snapshots there are.
        sandboxes: What is compared, and forks copies of snapshots.
        branches: Branches copies of sandboxes.
        jail: Where copies are.
        workers: Do what takes long.
        places: Those of comparisons.
    """

    telemetry: Telemetry
    vmm: Path
    store: SnapshotStore
    catalog: Catalog
    sandboxes: Sandboxes
    branches: Branches
    jail: Jail
    workers: Workers
    places: Places = field(default_factory=lambda: Places("comparisons", DIFFS_MAX, LONG_RETRY_S))

    @use_case("compare", Scope.RUN)
    async def compare(
        self, caller: Caller, before: SandboxId | Tag, after: SandboxId | Tag
    ) -> Difference:
        """Return how one machine differs from another."""
        chains = self._chain_of(caller, before), self._chain_of(caller, after)
        shared = common(*chains, lambda tag: called(self.catalog, caller, tag))
        chain = await self.workers.run(caller, lambda: load_chain(self.store, shared))
        disk = chain[-1].disk
        if disk is None:
            base = called(self.catalog, caller, shared)
            raise Conflict(f"what goes back to {base} has no disk", tag=base)
        with self.places.take(caller):
            async with staged_folder(self.store) as staged:
                await asyncio.to_thread(self.jail.let_through, staged)
                return await self._compare(
                    caller, disk, staged, self._copy(caller, before), self._copy(caller, after)
                )

    async def _compare(
        self,
        caller: Caller,
        disk: DiskConfig,
        staged: Path,
        before: contextlib.AbstractAsyncContextManager[_Copy],
        after: contextlib.AbstractAsyncContextManager[_Copy],
    ) -> Difference:
        async with before as one, after as other:
            apart = None
            if one.pid is not None and other.pid is not None:
                pids = one.pid, other.pid
                apart = await self.workers.run(caller, lambda: pages.apart(*pids, MEMORY_NAME))
            was = await _write(one, staged / "before", len(disk.layers))
            now = await _write(other, staged / "after", len(disk.layers))
        with self.jail.cell() as cell:
            config = CompareConfig(
                layers=disk.layers,
                size_bytes=disk.size_bytes,
                before=was,
                after=now,
                entries_max=DIFF_ENTRIES_MAX,
                changes_max=DIFF_CHANGES_MAX,
                uid=None if cell is None else cell.uid,
                rootless=None if cell is None else cell.rootless,
            )
            return _difference(await process.compare(self.vmm, config, staged), apart)

    def _chain_of(self, caller: Caller, name: SandboxId | Tag) -> tuple[Tag, ...]:
        """Return the snapshots that a sandbox or a snapshot goes back to, base first."""
        if is_sandbox_id(name):
            return self.catalog.chain(
                self.sandboxes.roster.get(caller, SandboxId(name)).sandbox.tag
            )
        return self.catalog.chain(self.catalog.look_up(caller, Tag(name)).tag)

    @contextlib.asynccontextmanager
    async def _copy(self, caller: Caller, name: SandboxId | Tag) -> AsyncGenerator[_Copy, None]:
        """Give a sibling of a sandbox, or a fork of a snapshot, that is gone after the block."""
        roster = self.sandboxes.roster
        if is_sandbox_id(name):
            pid = roster.get(caller, SandboxId(name)).sandbox.pid
            options = BranchOptions(all_or_nothing=True, die_with_daemon=True)
            fork = (await self.branches.branch(caller, SandboxId(name), 1, options)).fork
        else:
            terms = ForkOptions(all_or_nothing=True, die_with_daemon=True)
            fork = await self.sandboxes.fork(caller, Tag(name), 1, terms)
            pid = fork.sandboxes[0].pid
        id_ = fork.sandboxes[0].id
        try:
            owner = roster.get(caller, id_)
            yield _Copy(owner.control, owner.guest, pid, owner.lease.uid)
        finally:
            await to_end(self.sandboxes.delete_all([id_]))


def common(one: tuple[Tag, ...], other: tuple[Tag, ...], name: Callable[[Tag], str] = str) -> Tag:
    """Return the last snapshot that two chains, base first, have in common.

    Raises:
        Conflict: They have none, so everything would differ.
    """
    shared = [tag for tag, same in zip(one, other, strict=False) if tag == same]
    if not shared or one[0] != other[0]:
        raise Conflict(
            f"they have no common ancestor: one goes back to {name(one[0])}, the other to "
            f"{name(other[0])}"
        )
    return shared[-1]


async def _write(copy: _Copy, directory: Path, above: int) -> Path:
    """Write down what a copy's disk has above its lowest layers, all that its guest has written.

    Returns:
        The layer's file.
    """
    await folders.make(directory)
    await copy.guest.freeze()
    async with await Control.connect(copy.control) as control:
        await control.pause()
        await asyncio.to_thread(ownership.give, directory, copy.uid)
        layer = await control.save_disk(directory, above)
    await asyncio.to_thread(ownership.take_back, directory)
    return layer


def _difference(said: Compared, apart: int | None) -> Difference:
    changes = (
        FileChange(each.path, Change(each.change), each.kind, each.size_bytes)
        for each in said.changes
    )
    return Difference(tuple(sorted(changes, key=lambda each: each.path)), said.more, apart)
