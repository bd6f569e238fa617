"""Seeds: what a running machine leaves of itself at a branch.

A seed is a zygote that a machine forked of itself, and holds its memory, state and disk at
one instant.  Siblings are forked from it, and a durable snapshot is written by it.  It is counted
who needs one; after the last of them has released it, it is retired.

A retired seed listens no more.  Its memory is what its siblings are reset to, and it ends with
the last of them, or at once if it has none.  There is no list of them: the kernel knows which
process is whose parent, also after a restart of the daemon.

    async with await seeds.take(settings, owner.control, cgroup) as seed:
        async with await seed.connect() as zygote:
            await batch.fork(zygote)
        await seed.save(staged, memory=chain, disk_layers=2)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from forkd.engine.configs import BranchConfig, LinkConfig
from forkd.engine.control import Control
from forkd.engine.process import ZYGOTE_SOCKET, end, end_listener, listener
from forkd.errors import EngineError, ForkdError
from forkd.host import cgroupfs, files, proc
from forkd.service import folders
from forkd.service.allowance import limits_of
from forkd.service.chain_files import open_all
from forkd.service.jail import lent
from forkd.service.supervision import to_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from forkd.engine.replies import SavedFile
    from forkd.host.spawn import Process
    from forkd.model.sandbox import Sandbox
    from forkd.service.settings import HostSettings


RETIRED_NAME = "forkd-seed"
"""What a retired seed calls itself."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Seed:
    """One seed; retired when the last of its holders releases it.

    Attributes:
        process: It.
        directory: Its folder, which goes with it.
        pause_ms: How long its source was paused.
        uid: The user that it is, as its source; None for the daemon's.
        makes_users: Whether it can have its siblings be others, in a user namespace.
        holders: How many hold it.
    """

    process: Process
    directory: Path
    pause_ms: float
    uid: int | None = None
    makes_users: bool = False
    holders: int = 0

    def hold(self) -> None:
        """Keep the seed until `release`."""
        self.holders += 1

    async def release(self) -> None:
        """Undo one `hold`; retires the seed after the last.  Raises nothing of ours."""
        self.holders -= 1
        if self.holders == 0:
            await to_end(self.retire())

    async def __aenter__(self) -> Self:
        self.hold()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.release()

    async def connect(self) -> Control:
        """Return a connection, for `fork` and whatever else one asks a zygote.

        Raises:
            EngineExited: The seed has ended.
        """
        return await Control.connect(self.directory / ZYGOTE_SOCKET)

    async def save(
        self, directory: Path, *, memory: Sequence[Path], disk_layers: int
    ) -> tuple[SavedFile, ...]:
        """Write what differs from a parent to `directory`, which exists and is empty.

        Args:
            directory: Where; of a failed attempt nothing remains in it.
            memory: The parent's chain of memory files, base first; none to write all of it.
            disk_layers: How many of the lowest disk layers are the parent's.

        Raises:
            HostError: The disk is full, or the kernel refused something else.
            EngineError: The seed ended, or did not finish in time.
        """
        config = LinkConfig(directory, tuple(memory), disk_layers)
        async with await self.connect() as control, lent(directory, self.uid):
            with contextlib.ExitStack() as opened:
                await control.hand(await asyncio.to_thread(open_all, memory, opened))
                return await control.save_link(config)

    async def retire(self) -> None:
        """Let the process end with its siblings, and remove its folder; it may have ended.

        What was made with it is sound whether this works or not, so that what does not is logged,
        and left to the next start.
        """
        try:
            if not await self._leave_to_siblings():
                await end(self.process)
            await asyncio.to_thread(files.remove_from_under, self.directory)
        except ForkdError as error:
            about = {"pid": self.process.pid, "error": str(error)}
            log.warning("seed not retired", extra=about)
        finally:
            self.process.close()

    async def _leave_to_siblings(self) -> bool:
        """Whether there are siblings, which the process ends with from now on."""
        try:
            async with await self.connect() as control:
                return await control.retire() > 0
        except EngineError:  # it has ended, or is older than the request
            return False


def retired_for(machines: Iterable[int]) -> frozenset[int]:
    """Return the retired seeds to which machines are reset."""
    parents = {proc.parent(pid) for pid in machines}
    return frozenset(pid for pid in parents if pid and proc.name(pid) == RETIRED_NAME)


def retired_of(machine: int | None) -> int | None:
    """Return the retired seed to which a machine is reset; None for none."""
    found = () if machine is None else retired_for([machine])
    return next(iter(found), None)


def cgroup_of(source: Sandbox) -> Path | None:
    """Return the cgroup in which a sandbox's seed belongs; None for the one it is forked in.

    A seed must not end with its source, nor count against the source's limits.
    """
    return None if limits_of(source) is None else cgroupfs.own()


async def take(
    settings: HostSettings, control: Path, cgroup: Path | None = None, uid: int | None = None
) -> Seed:
    """Branch the machine that listens at `control`; returns once its seed listens.

    The machine is paused for `pause_ms` and goes on; one that was paused stays so.

    Args:
        settings: Where seeds live.
        control: The machine's control socket.
        cgroup: Where the seed belongs; see `cgroup_of`.
        uid: The user that the machine is, and its seed will be; None for the daemon's.

    Raises:
        Conflict: The machine cannot be branched in its state.
        EngineError: It ended, or did not answer in time.
        HostError: The kernel refused something.
    """
    directory = settings.zygotes_dir / secrets.token_hex(8)
    await folders.make(directory, uid)
    jailed = uid is not None or settings.rootless_jail
    config = BranchConfig(directory, cgroup)
    work = asyncio.ensure_future(_branch(control, config, uid, jailed=jailed))
    try:
        # The machine leaves its seed whether we wait or not, so we wait.
        return await asyncio.shield(work)
    except BaseException:
        await to_end(_abandon(work, directory))
        raise


async def _branch(control: Path, config: BranchConfig, uid: int | None, *, jailed: bool) -> Seed:
    # A jailed machine can have no process born in another cgroup: we move it.
    cgroup, born = (config.cgroup, None) if jailed else (None, config.cgroup)
    async with await Control.connect(control) as machine:
        branched = await machine.branch(BranchConfig(config.directory, born))
    process = await listener(config.directory / ZYGOTE_SOCKET)
    if cgroup is not None:
        await asyncio.to_thread(cgroupfs.enter, cgroup, process.pid)
    return Seed(process, config.directory, branched.pause_ms, uid, branched.users)


async def _abandon(work: asyncio.Future[Seed], directory: Path) -> None:
    """End the seed that nobody will own, if there is one."""
    await asyncio.wait([work])
    if not work.cancelled() and work.exception() is None:
        await work.result().retire()
        return
    try:
        await end_listener(directory / ZYGOTE_SOCKET)
    finally:
        await asyncio.to_thread(files.remove_from_under, directory)
