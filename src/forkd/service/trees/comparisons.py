"""How two machines differ: their files, from the layers of their disks, and pages of memory.

What a guest has written is in its caches until its kernel writes it out, so a disk is not read
behind a running guest's back.  A copy is made of each machine, a sibling of a sandbox or a fork of
a snapshot; the copy's guest writes everything out and freezes its file system, and what its disk
has above the layers that both have is written down.  Then the copies are gone, and a process
that may do nothing else compares the two (`forkd-vmm compare`): a file whose blocks are in
the common layers is the same, and is not read.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.engine import process
from forkd.engine.configs import CompareConfig
from forkd.engine.control import Control
from forkd.errors import Conflict
from forkd.host import pages
from forkd.limits import DIFF_CHANGES_MAX, DIFF_ENTRIES_MAX
from forkd.model.diff import Change, Difference, FileChange
from forkd.service.tasks import to_end

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from forkd.engine.configs import DiskConfig
    from forkd.engine.guest import Guest
    from forkd.engine.replies import Compared
    from forkd.model.ids import Tag
    from forkd.store.snapshots import SnapshotStore

MEMORY_NAME = "forkd-memory"
"""What the VMM calls the file in memory that guests' memory is mapped of."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a machine, which nobody else uses.

    Attributes:
        control: Its control socket.
        guest: Its agent.
        pid: The process whose memory is compared: the machine's itself, if it runs.
    """

    control: Path
    guest: Guest
    pid: int | None


@dataclass(frozen=True, slots=True)
class Ground:
    """What a comparison stands on.

    Attributes:
        vmm: The VMM's program.
        store: Where the copies' layers are written meanwhile.
        disk: The layers that both have.
    """

    vmm: Path
    store: SnapshotStore
    disk: DiskConfig


async def between(
    ground: Ground,
    before: AbstractAsyncContextManager[Copy],
    after: AbstractAsyncContextManager[Copy],
) -> Difference:
    """Return how one machine differs from another.

    Raises:
        GuestError: A guest's file system cannot be frozen, or is none that can be compared.
        HostError: The disk is full, or the kernel refused something else.
        EngineError: A copy ended, or something took too long.
    """
    staged = await asyncio.to_thread(ground.store.stage)
    try:
        async with before as one, after as other:
            apart = None
            if one.pid is not None and other.pid is not None:
                apart = await asyncio.to_thread(pages.apart, one.pid, other.pid, MEMORY_NAME)
            was = await _write(one, staged / "before", len(ground.disk.layers))
            now = await _write(other, staged / "after", len(ground.disk.layers))
        config = CompareConfig(
            layers=ground.disk.layers,
            size_bytes=ground.disk.size_bytes,
            before=was,
            after=now,
            entries_max=DIFF_ENTRIES_MAX,
            changes_max=DIFF_CHANGES_MAX,
        )
        return _difference(await process.compare(ground.vmm, config, staged), apart)
    finally:
        await to_end(asyncio.to_thread(ground.store.discard, staged))


def common(one: tuple[Tag, ...], other: tuple[Tag, ...]) -> Tag:
    """Return the last snapshot that two chains, base first, have in common.

    Raises:
        Conflict: They have none, so everything would differ.
    """
    shared = [tag for tag, same in zip(one, other, strict=False) if tag == same]
    if not shared or one[0] != other[0]:
        raise Conflict(
            f"they have no common ancestor: one goes back to {one[0]}, the other to {other[0]}"
        )
    return shared[-1]


async def _write(copy: Copy, directory: Path, above: int) -> Path:
    """Write down what a copy's disk has above its lowest layers, all that its guest has written."""
    await asyncio.to_thread(directory.mkdir)
    await copy.guest.freeze()
    async with await Control.connect(copy.control) as control:
        await control.pause()
        return await control.save_disk(directory, above)


def _difference(said: Compared, apart: int | None) -> Difference:
    changes = (
        FileChange(each.path, Change(each.change), each.kind, each.size_bytes)
        for each in said.changes
    )
    return Difference(tuple(sorted(changes, key=lambda each: each.path)), said.more, apart)
