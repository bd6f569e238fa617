"""All sandboxes of a host: fork them, find them, delete them.

A fork is asked of a zygote, which a snapshot has and which a running sandbox leaves of
itself at a branch; `Origin` says which.

A fork runs in a task of its own, so that a client that goes away in the middle
leaves no half-made children: the fork is finished, and its sandboxes are deleted.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING

from forkd.engine.configs import ChildConfig, Identity, NetworkConfig
from forkd.engine.process import CONTROL_SOCKET
from forkd.engine.replies import ChildFailed, ChildReady
from forkd.errors import CapacityError, EngineError, ForkdError, HostError, NotFound
from forkd.limits import EXITED_KEPT_MAX, SANDBOXES_MAX
from forkd.model.ids import new_sandbox_id
from forkd.model.sandbox import (
    ForkFailure,
    ForkOptions,
    ForkResult,
    Sandbox,
    SandboxState,
    SpawnTimes,
)
from forkd.network.plan import PREFIX_LENGTH
from forkd.service.lifecycle import LifeEvent, next_state
from forkd.service.owner import OwnerTools, SandboxOwner, stop_machine
from forkd.service.resources import limits_of
from forkd.service.tasks import to_end
from forkd.store.database import SandboxRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from forkd.engine.control import Control
    from forkd.engine.replies import SpawnStages
    from forkd.model.ids import SandboxId, Tag
    from forkd.network.plan import Plan, Slot
    from forkd.service.resources import Place, Resources
    from forkd.service.tasks import TaskOwner
    from forkd.store.database import Database

REQUEST_CHILDREN_MAX = 1_000
"""Most children in one request to a zygote, so that the request fits into a frame."""

UNDO_AT_ONCE = 32
"""How many machines of a failed fork are ended at the same time."""

_MIB = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SandboxTools:
    """What sandboxes need of the rest of the service.

    Attributes:
        database: Where they are remembered.
        resources: What they have on the host.
        tasks: Who owns their tasks.
        network: Which links there are.
    """

    database: Database
    resources: Resources
    tasks: TaskOwner
    network: Plan


@dataclass(slots=True)
class Origin:
    """What sandboxes are forked from.

    Attributes:
        tag: The snapshot that all of it goes back to.
        connect: Connects to the zygote, which need not exist before: it is called once the
            children have all they need on the host.
        ancestors: Those of the children, their parent last.
        branched_at: At which instant of the parent's life; set by `connect`.
    """

    tag: Tag
    connect: Callable[[], AbstractAsyncContextManager[Control]]
    ancestors: tuple[SandboxId, ...] = ()
    branched_at: datetime | None = None


@dataclass(slots=True)
class _Child:
    """One child of a fork on its way: what was asked for, and what became of it."""

    sandbox: Sandbox
    slot: Slot | None
    place: Place | None = None
    failure: ForkFailure | None = None

    def fail(self, stage: str, code: str, message: str) -> None:
        self.failure = ForkFailure(self.sandbox.id, stage, code, message)


class Sandboxes:
    """The sandboxes of one host."""

    def __init__(self, tools: SandboxTools) -> None:
        self._tools = tools
        self._owners: dict[SandboxId, SandboxOwner] = {}
        self._exited: dict[SandboxId, None] = {}
        self._slots: Counter[int] = Counter()
        self._forking = 0
        self._owner_tools = OwnerTools(
            tools.database,
            tools.resources,
            freed=self._free,
            gone=self._forget,
            exited=self._note_exit,
        )

    def list_all(self, tag: Tag | None = None) -> tuple[Sandbox, ...]:
        """Return every sandbox, oldest first; only those forked from `tag` if it is given."""
        all_ = (owner.sandbox for owner in self._owners.values())
        return tuple(sandbox for sandbox in all_ if tag is None or sandbox.tag == tag)

    def alive(self, tag: Tag | None = None) -> tuple[Sandbox, ...]:
        """Return those whose machine has not ended."""
        return tuple(s for s in self.list_all(tag) if s.state is not SandboxState.EXITED)

    def owner(self, sandbox: SandboxId) -> SandboxOwner:
        """Return the owner of a sandbox.

        Raises:
            NotFound: There is none of that id.
        """
        owner = self._owners.get(sandbox)
        if owner is None:
            raise NotFound(f"no sandbox {sandbox}", sandbox=sandbox)
        return owner

    def adopt(self, row: SandboxRow) -> None:
        """Own a sandbox that an earlier daemon forked and that runs, or has exited."""
        index = row.network_index
        slot = None
        if index is not None:
            slot = self._tools.network.slot(index, row.tap_index)
            self._take(slot)
        self._own(row, slot)
        if row.sandbox.state is SandboxState.EXITED:
            self._exited[row.sandbox.id] = None

    async def fork(self, origin: Origin, count: int, options: ForkOptions) -> ForkResult:
        """Fork `count` sandboxes of an origin; see `forkd.service.api`.

        Raises:
            CapacityError: The host has no room for so many.
            EngineError: The zygote ended, or `all_or_nothing` was asked for and one failed.
        """
        if len(self._owners) + self._forking + count > SANDBOXES_MAX:
            raise CapacityError(f"a host has at most {SANDBOXES_MAX} sandboxes", asked=count)
        children = self._children(origin, count, options)
        self._forking += count
        try:
            return await self._fork(origin, children, options)
        except BaseException:
            await to_end(self._undo(children))
            raise
        finally:
            self._forking -= count

    async def delete_all(self, sandboxes: Iterable[SandboxId]) -> None:
        """Delete many sandboxes at once; those that are gone are fine, failures are logged."""
        deletions = [self._delete_quietly(id_) for id_ in sandboxes]
        await asyncio.gather(*deletions)

    async def _delete_quietly(self, sandbox: SandboxId) -> None:
        try:
            await self.owner(sandbox).delete()
        except NotFound:
            return
        except ForkdError as error:
            log.warning("sandbox not deleted", extra={"sandbox": sandbox, "error": str(error)})

    async def remember(self, rows: Iterable[SandboxRow]) -> None:
        """Write rows, all or none.

        Raises:
            StoreError: They could not be written.
        """
        await asyncio.to_thread(self._tools.database.put, tuple(rows))

    def inherited(self, child: Slot | None, parent: Slot | None) -> Slot | None:
        """Return the link that has the tap of a child and the addresses of its parent."""
        if child is None or parent is None:
            return child
        return self._tools.network.slot(parent.index, child.tap_index)

    def exchange(self, child: SandboxOwner, parent: SandboxOwner, slot: Slot | None) -> None:
        """Let a child, which has its parent's id by now, and its parent be found as they are.

        Args:
            child: Who was promoted.
            parent: Who has the id that the child had.
            slot: The child's link from now on.
        """
        for owner in (child, parent):
            self._owners[owner.sandbox.id] = owner
            self._exited.pop(owner.sandbox.id, None)
        if slot is not None:
            self._take(slot)
        if child.slot is not None:
            self._free(child.slot)
        child.slot = slot

    def _children(self, origin: Origin, count: int, options: ForkOptions) -> list[_Child]:
        """Decide who the children of a fork are, before anything is made."""
        slots: list[Slot | None] = [None] * count
        if options.network:
            for place, index in enumerate(self._tools.network.free(count, self._slots)):
                slots[place] = slot = self._tools.network.slot(index)
                self._take(slot)
        now = datetime.now(UTC)
        return [_Child(_new_sandbox(origin, now, options, slot), slot) for slot in slots]

    async def _fork(
        self, origin: Origin, children: list[_Child], options: ForkOptions
    ) -> ForkResult:
        tools, loop = self._tools, asyncio.get_running_loop()
        await asyncio.to_thread(tools.database.put, [_row(child) for child in children])
        await asyncio.to_thread(self._prepare, children, options)
        started = loop.time()
        async with origin.connect() as zygote:
            await self._ask_zygote(zygote, children, options)
        wall_ms = (loop.time() - started) * 1_000
        failures = tuple(child.failure for child in children if child.failure is not None)
        if failures and options.all_or_nothing:
            raise _all_or_nothing_error(failures, len(children))
        ready = [child for child in children if child.failure is None]
        for child in ready:
            child.sandbox = replace(child.sandbox, branched_at=origin.branched_at)
        if options.kept:  # the next daemon ends what is still remembered as starting
            await asyncio.to_thread(tools.database.put, [_row(child) for child in ready])
        await self._release([child for child in children if child.failure is not None])
        for child in ready:
            self._own(_row(child), child.slot)
        return ForkResult(tuple(child.sandbox for child in ready), failures, wall_ms)

    def _prepare(self, children: list[_Child], options: ForkOptions) -> None:
        """Give each child what it has on the host; blocks."""
        limits = limits_of(options)
        for child in children:
            try:
                child.place = self._tools.resources.prepare(child.sandbox.id, limits, child.slot)
            except HostError as error:
                child.fail("prepare", error.code, str(error))

    async def _ask_zygote(
        self, zygote: Control, children: list[_Child], options: ForkOptions
    ) -> None:
        """Have the prepared children forked, and note what became of each."""
        waiting = {str(child.sandbox.id): child for child in children if child.failure is None}
        configs = [_config(child, options) for child in waiting.values()]

        def note(outcome: ChildReady | ChildFailed) -> None:
            child = waiting.pop(outcome.id, None)
            if child is not None:
                _note(child, outcome)

        for start in range(0, len(configs), REQUEST_CHILDREN_MAX):
            batch = configs[start : start + REQUEST_CHILDREN_MAX]
            await zygote.fork(batch, deadline_s=options.deadline_s, on_outcome=note)
        for child in waiting.values():
            child.fail("zygote", "engine", "the zygote never spoke of this child")

    def _own(self, row: SandboxRow, slot: Slot | None) -> None:
        owner = SandboxOwner(row, slot, self._owner_tools)
        self._owners[row.sandbox.id] = owner
        self._tools.tasks.spawn(owner.run(), name=f"owner of {row.sandbox.id}")

    async def _undo(self, children: list[_Child]) -> None:
        """End all children of a fork that failed as a whole."""
        at_once = asyncio.Semaphore(UNDO_AT_ONCE)
        await asyncio.gather(*(self._stop(child, at_once) for child in children))
        await self._release(children)

    async def _stop(self, child: _Child, at_once: asyncio.Semaphore) -> None:
        control = self._tools.resources.directory(child.sandbox.id) / CONTROL_SOCKET
        try:
            async with at_once:
                await stop_machine(control, child.sandbox.pid)
        except EngineError as error:
            id_ = child.sandbox.id
            log.warning("child not ended", extra={"sandbox": id_, "error": str(error)})

    async def _release(self, children: list[_Child]) -> None:
        """Take back what children that do not live had, and forget them."""
        if not children:
            return
        released = await asyncio.to_thread(self._release_blocking, children)
        await asyncio.to_thread(self._tools.database.remove, released)
        for child in children:
            if child.slot is not None:
                self._free(child.slot)

    def _release_blocking(self, children: list[_Child]) -> list[SandboxId]:
        released = []
        for child in children:
            try:
                self._tools.resources.release(child.sandbox.id, child.slot)
            except HostError as error:
                # Its row stays, and with it the next start's duty to try again.
                log.warning(
                    "child not cleaned", extra={"sandbox": child.sandbox.id, "error": error}
                )
            else:
                released.append(child.sandbox.id)
        return released

    def _forget(self, owner: SandboxOwner) -> None:
        """Forget a sandbox that is gone; its owner calls this."""
        del self._owners[owner.sandbox.id]
        self._exited.pop(owner.sandbox.id, None)

    def _free(self, slot: Slot) -> None:
        """Let others have a link; the owner of the sandbox that had it calls this."""
        for index in {slot.index, slot.tap_index}:
            self._slots[index] -= 1
            if self._slots[index] == 0:
                del self._slots[index]

    def _take(self, slot: Slot) -> None:
        self._slots.update({slot.index, slot.tap_index})

    def _note_exit(self, owner: SandboxOwner) -> None:
        """Remember a sandbox that ended by itself for a while; its owner calls this."""
        self._exited[owner.sandbox.id] = None
        if len(self._exited) > EXITED_KEPT_MAX:
            oldest = next(iter(self._exited))
            del self._exited[oldest]
            self._tools.tasks.spawn(self._delete_quietly(oldest), name=f"forget {oldest}")


def identity_of(sandbox: Sandbox, slot: Slot | None) -> Identity:
    """Return what a sandbox's guest is told of itself; the boot id is another each time."""
    return Identity(
        hostname=sandbox.hostname,
        machine_id=machine_id(sandbox.id),
        boot_id=str(uuid.uuid4()),
        network=network_of(slot),
    )


def _times(stages: SpawnStages) -> SpawnTimes:
    return SpawnTimes(
        clone_ms=stages.clone,
        build_ms=stages.build,
        resume_ms=stages.resume,
        agent_ms=stages.agent,
        total_ms=stages.total,
    )


def machine_id(sandbox: SandboxId) -> str:
    """Return the machine id of a sandbox's guest: nobody else's, and the same after a reset."""
    return blake2b(sandbox.encode(), digest_size=16, person=b"machine-id").hexdigest()


def network_of(slot: Slot | None) -> NetworkConfig | None:
    """Return the network interface that a link stands for."""
    if slot is None:
        return None
    return NetworkConfig(slot.tap, slot.mac, f"{slot.guest}/{PREFIX_LENGTH}")


def _new_sandbox(origin: Origin, now: datetime, options: ForkOptions, slot: Slot | None) -> Sandbox:
    id_ = new_sandbox_id()
    ttl_s = options.ttl_s
    return Sandbox(
        id=id_,
        tag=origin.tag,
        state=SandboxState.STARTING,
        created_at=now,
        hostname=id_,
        address=None if slot is None else slot.guest,
        memory_limit_mib=options.memory_limit_mib,
        disk_limit_mib=options.disk_limit_mib,
        ancestors=origin.ancestors,
        expires_at=None if ttl_s is None else now + timedelta(seconds=ttl_s),
        cpu_limit=options.cpu_limit,
        pids_limit=options.pids_limit,
    )


def _row(child: _Child) -> SandboxRow:
    index = None if child.slot is None else child.slot.index
    return SandboxRow(child.sandbox, index, place=child.sandbox.id, tap_index=index)


def _config(child: _Child, options: ForkOptions) -> ChildConfig:
    place = child.place
    if place is None:
        raise AssertionError("only prepared children are asked for")
    limit_mib = options.disk_limit_mib
    return ChildConfig(
        id=child.sandbox.id,
        directory=place.directory,
        identity=identity_of(child.sandbox, child.slot),
        cgroup=place.cgroup,
        top_limit_bytes=None if limit_mib is None else limit_mib * _MIB,
    )


def _note(child: _Child, outcome: ChildReady | ChildFailed) -> None:
    if isinstance(outcome, ChildFailed):
        child.fail(outcome.stage, outcome.code, outcome.message)
        return
    state = next_state(child.sandbox.state, LifeEvent.READY)
    child.sandbox = replace(child.sandbox, state=state, pid=outcome.pid, spawn=_times(outcome.ms))


def _all_or_nothing_error(failures: tuple[ForkFailure, ...], asked: int) -> EngineError:
    first = failures[0]
    return EngineError(
        f"{len(failures)} of {asked} children failed, the first at {first.stage}: {first.message}",
        stage=first.stage,
        control_code=first.code,
        failed=len(failures),
    )
