"""What a sandbox holds of the host beside its process: a folder, a cgroup, a user, a network slot.

    reserve   decides which, from pools; nothing is made, so that it can be written down first
    acquire   makes it
    transfer  gives a promoted child the addresses of its parent; its folder, cgroup and tap stay
    release   takes all of it back, and may be called again

A lease bears the id of the sandbox that it was made for, which a promotion does not change: no
folder can be renamed in one step with a database.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forkd.engine.process import CONSOLE_LOG
from forkd.errors import Conflict, ForkdError
from forkd.host import files, ownership, proc
from forkd.model.caller import DEFAULT_TENANT
from forkd.network import taps
from forkd.network.rules import Wall
from forkd.service import siblings
from forkd.service.allowance import limits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from forkd.cgroups.limits import Limits
    from forkd.cgroups.tree import CgroupTree
    from forkd.model.caller import Tenant
    from forkd.model.ids import SandboxId
    from forkd.model.network import NetworkPolicy
    from forkd.model.sandbox import Sandbox
    from forkd.model.secret import SecretUse
    from forkd.network.plan import Slot
    from forkd.service.egress import Egress
    from forkd.service.jail import Jail, Part
    from forkd.service.siblings import SiblingUsers
    from forkd.service.slots import Slots
    from forkd.store.database import SandboxRow

KEPT_FILES = frozenset({CONSOLE_LOG, f"{CONSOLE_LOG}.1"})
"""What is kept of a sandbox that ended by itself, so that somebody can see why."""

_MIB = 1 << 20


@dataclass(slots=True)
class Lease:
    """What one sandbox holds of the host.

    Attributes:
        id: The sandbox that it was reserved for.
        directory: Its folder.
        cgroup: Its cgroup; None without limits, or before it was acquired.
        slot: Its network slot; None without a network.
        uid: The user that its process is; None for the daemon's.
        tenant: Whose sandbox it is.
        policy: What it may reach by that; None without a network.
        held: Whether it may reach nothing at the moment.
        bandwidth_mbit: How much goes over its network each way, in millions of bits a second; None
            for no limit.
        use: Which secrets it uses; None for none.
        siblings: Who its siblings can be; None before its first branch.
        seed: The process whose memory it goes back to at a reset, if that is a seed's.
    """

    id: SandboxId
    directory: Path
    cgroup: Path | None = None
    slot: Slot | None = None
    uid: int | None = None
    tenant: Tenant = DEFAULT_TENANT
    policy: NetworkPolicy | None = None
    held: bool = False
    bandwidth_mbit: int | None = None
    use: SecretUse | None = None
    siblings: SiblingUsers | None = None
    seed: int | None = None

    def open_siblings(self) -> int | None:
        """Return a descriptor, the caller's, of its siblings' user namespace; None for none.

        Raises:
            Conflict: The lease was released meanwhile.
        """
        return None if self.siblings is None else self.siblings.duplicate()

    @property
    def wall(self) -> Wall | None:
        """What stands around it; None without a network."""
        if self.slot is None or self.policy is None:
            return None
        return Wall(
            self.id,
            self.slot,
            self.policy,
            self.held,
            self.bandwidth_mbit,
            self.use,
            tenant=self.tenant,
        )


class Leases:
    """The leases of one host.

    Args:
        folder: Where sandboxes have their folders.
        cgroups: Where limited ones have their cgroups.
        slots: Their network slots.
        jail: Which users their processes are.
        egress: What stands around those who have a network slot.
    """

    def __init__(
        self, folder: Path, cgroups: CgroupTree, slots: Slots, jail: Jail, egress: Egress
    ) -> None:
        self._jail = jail
        self._folder = folder
        self._egress = egress
        self._cgroups = cgroups
        self._slots = slots

    def directory(self, lease: SandboxId) -> Path:
        """Return the folder of a lease."""
        return self._folder / lease

    def reserve(
        self,
        sandboxes: Sequence[SandboxId],
        network: NetworkPolicy | None,
        *,
        held: bool = False,
        bandwidth_mbit: int | None = None,
        origin: Lease | Part | None = None,
    ) -> tuple[Lease, ...]:
        """Return exclusive leases, of which nothing is made yet.

        Args:
            sandboxes: Whose.
            network: What each may reach by a network slot; None for none.
            held: Whether each may reach nothing at the moment.
            bandwidth_mbit: How much goes over each one's network each way; None for no limit.
            origin: Whose siblings they are, after `prepare_siblings` was called for as many; or
                the users of the zygote that is to fork them, None if these are the daemon's.

        Raises:
            CapacityError: There are not so many network slots, or users.
            InvalidRequest: The rules of `network` overlap in too many ways.
        """
        source = origin if isinstance(origin, Lease) else None
        part = None if isinstance(origin, Lease) else origin
        slots: Iterable[Slot | None] = [None] * len(sandboxes)
        if network is not None:
            self._egress.check(network)
            old = source is not None and source.slot is not None and not source.slot.ipv6
            slots = self._slots.reserve(len(sandboxes), ipv6=not old)  # of before IPv6
        leases = []
        for sandbox, slot in zip(sandboxes, slots, strict=True):
            lease = Lease(sandbox, self.directory(sandbox), slot=slot, policy=network, held=held)
            lease.bandwidth_mbit = bandwidth_mbit
            leases.append(lease)
        try:
            for lease in leases:
                lease.uid = (
                    self._jail.take(part) if source is None else siblings.take(self._jail, source)
                )
        except BaseException:
            for lease in leases:
                self._free_slot(lease)
                self._free_uid(lease)
            raise
        return tuple(leases)

    async def prepare_siblings(self, vmm: Path, source: Lease, pid: int, count: int) -> None:
        """Have users for so many siblings, as `siblings.prepare` says."""
        await siblings.prepare(vmm, self._jail, source, pid, count)

    def leave(self, lease: Lease) -> None:
        """Let go of what this daemon alone needs of a lease; its sandbox may live on."""
        siblings.release(self._jail, lease)

    def share(self, lease: Lease, source: Lease) -> None:
        """Make a sibling its source's user, as `siblings.share` says."""
        siblings.share(self._jail, lease, source)

    def adopt(self, row: SandboxRow) -> Lease:
        """Return the lease of a sandbox that an earlier daemon made."""
        slot = None
        if row.network_index is not None:
            ipv6 = row.sandbox.address_v6 is not None
            slot = self._slots.of(row.network_index, row.tap_index, ipv6=ipv6)
            self._slots.use(slot)
        directory = self.directory(row.lease)
        uid = self._jail.hold(self._jail.owner(directory))
        policy, held = row.sandbox.network, row.sandbox.egress_held
        lease = Lease(row.lease, directory, slot=slot, uid=uid, policy=policy, held=held)
        lease.bandwidth_mbit, lease.use = row.sandbox.bandwidth_limit_mbit, row.sandbox.use
        lease.tenant = row.sandbox.owner.tenant
        return lease

    async def check(self, limits: Limits | None) -> None:
        """Return if this host can set `limits`, as far as it can be known before.

        Raises:
            HostError: It cannot limit I/O.
        """
        if limits is not None and limits.has_io:
            await asyncio.to_thread(self._cgroups.check, limits)

    async def acquire(
        self, leases: Sequence[Lease], limits: Limits | None
    ) -> dict[SandboxId, ForkdError]:
        """Make what was reserved; return what failed, by id, which is to be released as well."""
        failed = await asyncio.to_thread(_try_each, leases, lambda it: self._make(it, limits))
        made = [each for each in leases if each.id not in failed]
        unmade = await self._slots.make(slots_of(made))
        failed |= {
            each.id: unmade[each.slot.tap] for each in made if each.slot and each.slot.tap in unmade
        }
        try:
            await self._egress.put(walls_of(each for each in leases if each.id not in failed))
        except ForkdError as error:
            failed |= {each.id: error for each in leases if each.slot is not None}
        return failed

    def open_tap(self, tap: str) -> int:
        """Return a descriptor of a lease's tap, as `Slots.open_tap` says; blocks."""
        return self._slots.open_tap(tap)

    def close_taps(self, leases: Iterable[Lease]) -> None:
        """Let go of taps that are kept open, of leases whose machines open theirs themselves."""
        self._slots.close_taps(slots_of(leases))

    def replenish(self) -> None:
        """Have made in the background what forks are to find ready."""
        self._slots.refill()

    async def release(self, leases: Sequence[Lease]) -> dict[SandboxId, ForkdError]:
        """Take everything back; return what failed, by id, which keeps its network slot."""
        failed = await asyncio.to_thread(
            _try_each, leases, lambda it: self._remove(it, keep_console=False)
        )
        gone = [lease for lease in leases if lease.id not in failed]
        try:
            await self._slots.remove(slots_of(gone))
        except ForkdError as error:
            failed |= {each.id: error for each in gone if each.slot is not None}
        for lease in leases:
            if lease.id not in failed:
                self._free_slot(lease)
                self._free_uid(lease)
        return failed

    async def release_one(self, lease: Lease, *, keep_console: bool = False) -> None:
        """Take everything back, or all but the console's log.

        Raises:
            ForkdError: The kernel refused; the lease keeps its network slot, and this can be
                called again.
        """
        await asyncio.to_thread(self._remove, lease, keep_console=keep_console)
        await self._slots.remove(slots_of([lease]))
        self._free_slot(lease)
        self._free_uid(lease)

    async def limit(self, lease: Lease, before: Sandbox, after: Sandbox) -> None:
        """Change the limits that a sandbox has, or nothing.

        Raises:
            Conflict: It has no cgroup, or no network, or more memory in use than it would be left.
            HostError: The kernel refused.
        """
        await self._limit_bandwidth(lease, after)
        try:
            if limits_of(before) != limits_of(after):
                await self._limit_process(lease, before, after)
        except ForkdError:
            await self._limit_bandwidth(lease, before)
            raise

    async def _limit_bandwidth(self, lease: Lease, after: Sandbox) -> None:
        if lease.bandwidth_mbit == after.bandwidth_limit_mbit:
            return
        limited = replace(lease, bandwidth_mbit=after.bandwidth_limit_mbit)
        if limited.wall is None:
            raise Conflict(
                f"sandbox {after.id} was forked without a network: there is no bandwidth to limit",
                sandbox=after.id,
            )
        await self._egress.limit(limited.wall)
        lease.bandwidth_mbit = limited.bandwidth_mbit

    async def _limit_process(self, lease: Lease, before: Sandbox, after: Sandbox) -> None:
        old, new = limits_of(before), limits_of(after)
        used_bytes = await asyncio.to_thread(self._cgroups.memory_bytes, lease.id)
        if old is None or new is None or used_bytes is None:
            raise Conflict(
                f"sandbox {before.id} was forked without limits, and has no cgroup: fork another "
                "with limits, or have the operator set FORKD_CGROUPS=on",
                sandbox=before.id,
            )
        pid = before.pid

        def change() -> None:
            seeds = 0 if pid is None else len(proc.children(pid))
            if new.memory_bytes is not None and used_bytes > new.memory_bytes * (1 + seeds):
                raise Conflict(
                    f"sandbox {before.id} has {used_bytes // _MIB} MiB in use: ask for more than "
                    "that, or reset it first",
                    sandbox=before.id,
                    used_mib=used_bytes // _MIB,
                )
            try:
                self._cgroups.limit(lease.id, new.for_seeds(seeds))
            except ForkdError:
                self._cgroups.limit(lease.id, old.for_seeds(seeds))
                raise

        await asyncio.to_thread(change)

    async def allow_seeds(self, lease: Lease, sandbox: Sandbox, more: int) -> None:
        """Have room under a sandbox's limit of memory for the seeds that it has, and for `more`.

        Raises:
            HostError: The kernel refused.
        """
        limits, pid = limits_of(sandbox), sandbox.pid
        if limits is None or pid is None:
            return

        def allow() -> None:
            self._cgroups.limit(lease.id, limits.for_seeds(len(proc.children(pid)) + more))

        await asyncio.to_thread(allow)

    async def hurry(self, lease: Lease, sandbox: Sandbox) -> None:
        """Let a sandbox that is to end do its I/O without limits: it ends when that is done."""
        limits = limits_of(sandbox)
        if limits is not None and limits.has_io:
            await asyncio.to_thread(self._cgroups.hurry, lease.id)

    async def out_of_memory(self, lease: Lease) -> str | None:
        """Return what wanted memory if the sandbox was killed for that, or None."""
        return await asyncio.to_thread(self._cgroups.out_of_memory, lease.id)

    def inherited(self, child: Lease, parent: Lease) -> Slot | None:
        """Return the slot that `transfer` would give a child: its tap, its parent's addresses."""
        if child.slot is None or parent.slot is None:
            return child.slot
        return self._slots.of(parent.slot.index, child.slot.tap_index, ipv6=child.slot.ipv6)

    def transfer(self, parent: Lease, child: Lease) -> None:
        """Give a child the addresses of its parent; `readdress` makes it so on the host."""
        slot = self.inherited(child, parent)
        if slot is not None:
            self._slots.use(slot)
        self._free_slot(child)
        child.slot = slot

    async def readdress(self, lease: Lease) -> None:
        """Give a lease's tap the address of its slot, and its walls what it may; idempotent.

        Raises:
            HostError: The kernel refused.
        """
        if lease.slot is not None:
            await asyncio.to_thread(taps.readdress, lease.slot)
            await self._egress.put(walls_of([lease]))

    def _make(self, lease: Lease, limits: Limits | None) -> None:
        files.make_folder(lease.directory)
        ownership.give(lease.directory, lease.uid)
        lease.cgroup = (
            None if limits is None else self._cgroups.create(lease.id, limits, by_zygotes=True)
        )

    def _remove(self, lease: Lease, *, keep_console: bool) -> None:
        self._cgroups.remove(lease.id)
        self._jail.sweep(lease.uid)
        if keep_console:
            files.remove_all_but(lease.directory, KEPT_FILES)
            if lease.uid is not None and files.is_there(lease.directory):
                ownership.take_back(lease.directory)
        else:
            files.remove_from_under(lease.directory)

    def _free_uid(self, lease: Lease) -> None:
        uid, lease.uid = lease.uid, None
        self._jail.give_back(uid)
        siblings.release(self._jail, lease)

    def _free_slot(self, lease: Lease) -> None:
        slot, lease.slot = lease.slot, None
        if slot is not None:
            self._slots.free(slot)


def _try_each(leases: Iterable[Lease], act: Callable[[Lease], None]) -> dict[SandboxId, ForkdError]:
    """Do something to each; return what failed, by id."""
    failed = {}
    for lease in leases:
        try:
            act(lease)
        except ForkdError as error:
            failed[lease.id] = error
    return failed


def slots_of(leases: Iterable[Lease]) -> list[Slot]:
    """Return the slots of those of `leases` that have a network."""
    return [lease.slot for lease in leases if lease.slot is not None]


def walls_of(leases: Iterable[Lease]) -> list[Wall]:
    """Return the walls around those of `leases` that have a network."""
    return [wall for wall in (lease.wall for lease in leases) if wall is not None]
