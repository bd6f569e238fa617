"""What tenants have, and what they may have: checked before anything is made.

A fork reserves what its sandboxes may use before they are there, and each counts by itself from
the moment when it is, so that two hundred requests at once do not exceed a quota that one would
not.  A sandbox counts with what it may use, its limits, until its machine has ended; so does a
machine that is baked.  Of a branch its seed counts besides, with the memory of its source, as long
as it writes a snapshot, or there are siblings that are reset to it; of a snapshot that is forked
its zygote, with the memory that it holds.  A snapshot counts with what it takes in the store, and
while it is written with the most that it can take.  An uploaded recipe counts like a snapshot, for
the tenant that has uploaded it first; so does an image in the cache, for the tenant whose request
has built it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from dataclasses import replace
from typing import TYPE_CHECKING

from forkd.errors import QuotaExceeded
from forkd.model.tenant import Amounts, Quotas

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from forkd.model.caller import Tenant
    from forkd.model.sandbox import ForkOptions, Sandbox
    from forkd.model.snapshot import Snapshot

FORKS_WINDOW_S = 60.0
"""Over how long forks are counted."""

_MIB = 1 << 20


class Reservation:
    """What a tenant is about to have; nothing once it was `settle`d."""

    def __init__(self, tenant: Tenant, amounts: Amounts) -> None:
        self.tenant = tenant
        self.amounts = amounts

    def settle(self) -> None:
        """Reserve nothing any more: what was made counts by itself from now on."""
        self.amounts = Amounts()


class Ledger:
    """Counts what each tenant has.

    Attributes:
        quotas: What tenants may have; one that is not in it may have anything.
        make_room: Gives up some of what a tenant has and does not need, by the name of a quota,
            such as the memory of a zygote that nobody forks from; says whether there was any.
    """

    def __init__(self) -> None:
        self.quotas: dict[Tenant, Quotas] = {}
        self.make_room: dict[str, Callable[[Tenant], bool]] = {}
        self._counted: dict[str, tuple[Tenant, Amounts]] = {}
        self._shared: dict[str, set[str]] = {}
        self._total: defaultdict[Tenant, Amounts] = defaultdict(Amounts)
        self._reserved: set[Reservation] = set()
        self._forks: defaultdict[Tenant, _Window] = defaultdict(_Window)

    def tenants(self) -> set[Tenant]:
        """Return who has something, or quotas."""
        return {*self.quotas, *(tenant for tenant, _ in self._counted.values())}

    def used(self, tenant: Tenant) -> Amounts:
        """Return what a tenant has, and is about to have."""
        used = self._total[tenant] + Amounts(forks_per_minute=self._forks[tenant].total())
        for each in self._reserved:
            if each.tenant == tenant:
                used += replace(each.amounts, forks_per_minute=0)  # they are in the window
        return used

    def kept(self) -> int:
        """Return how many records of forks there are: what a daemon that runs for long holds."""
        return sum(len(window) for window in self._forks.values())

    def promised(self) -> Amounts:
        """Return what all tenants together have, and are about to have."""
        reserved = (each.amounts for each in self._reserved)
        return sum((*self._total.values(), *reserved), start=Amounts())

    def check(self, tenant: Tenant, asked: Amounts) -> None:
        """Return if a tenant may have so much more.

        Raises:
            QuotaExceeded: It may not.
        """
        quotas = self.quotas.get(tenant)
        if quotas is None:
            return
        while exceeded := next(quotas.exceeded(self.used(tenant), asked), None):
            name, more, limit, used = exceeded
            make_room = self.make_room.get(name)
            if make_room is not None and make_room(tenant):
                continue
            raise QuotaExceeded(
                f"the tenant {tenant} may have {name} up to {limit}: {used} in use, and {more} "
                "more asked for",
                quota=name,
                asked=more,
                limit=limit,
                used=used,
            )

    def memory_left_mib(self, tenant: Tenant) -> int | None:
        """Return how much more memory a tenant may have; None for no limit."""
        quotas = self.quotas.get(tenant, Quotas())
        if quotas.memory_mib is None:
            return None
        return max(0, quotas.memory_mib - self.used(tenant).memory_mib)

    @contextlib.contextmanager
    def reserve(self, tenant: Tenant, asked: Amounts) -> Generator[Reservation, None, None]:
        """Have a tenant about to have something within the block.

        Raises:
            QuotaExceeded: It may not have so much.
        """
        self.check(tenant, asked)
        if asked.forks_per_minute:
            self._forks[tenant].add(asked.forks_per_minute)
        reservation = Reservation(tenant, asked)
        self._reserved.add(reservation)
        try:
            yield reservation
        finally:
            self._reserved.discard(reservation)

    def count(self, key: str, tenant: Tenant, amounts: Amounts) -> None:
        """Count something that is there from now on, instead of what it counted as before."""
        self.release(key)
        self._counted[key] = tenant, amounts
        self._total[tenant] += amounts

    def recount(self, key: str, tenant: Tenant, amounts: Amounts) -> None:
        """Count something otherwise than before, if its tenant may have so much more.

        Raises:
            QuotaExceeded: It may not; the thing counts as before.
        """
        _, before = self._counted.get(key, (tenant, Amounts()))
        self.check(tenant, amounts - before)
        self.count(key, tenant, amounts)

    def share(self, key: str, holder: str, tenant: Tenant, amounts: Amounts) -> None:
        """Count something once for all who hold it, until the last of them was `let_go`."""
        holders = self._shared.setdefault(key, set())
        if not holders:
            self.count(key, tenant, amounts)
        holders.add(holder)

    def let_go(self, key: str, holder: str) -> None:
        """Undo one `share`; who does not hold it is fine."""
        holders = self._shared.get(key, set())
        holders.discard(holder)
        if not holders and self._shared.pop(key, None) is not None:
            self.release(key)

    def release(self, key: str) -> None:
        """Count something no more; what is not counted is fine."""
        counted = self._counted.pop(key, None)
        if counted is not None:
            tenant, amounts = counted
            self._total[tenant] -= amounts


class _Window:
    """How many forks there were within the last minute.

    They are counted by the second, so that it takes no more memory however many there are; each
    counts until its second has been over for a minute.
    """

    def __init__(self) -> None:
        self._forks: deque[tuple[int, int]] = deque()
        self._total = 0

    def add(self, count: int) -> None:
        now_s = int(asyncio.get_running_loop().time())
        self.total()  # forgets what is over, also where nobody asks
        before = self._forks.pop()[1] if self._forks and self._forks[-1][0] == now_s else 0
        self._forks.append((now_s, before + count))
        self._total += count

    def __len__(self) -> int:
        return len(self._forks)

    def total(self) -> int:
        oldest_s = asyncio.get_running_loop().time() - FORKS_WINDOW_S
        while self._forks and self._forks[0][0] + 1 <= oldest_s:
            _, count = self._forks.popleft()
            self._total -= count
        return self._total


def amounts_of(options: Sandbox | ForkOptions, snapshot: Snapshot | None) -> Amounts:
    """Return how a sandbox counts: what it may use.

    Args:
        options: It, or how it is forked.
        snapshot: What it goes back to; None if that is not known any more.
    """
    memory_mib, disk_mib = options.memory_limit_mib, options.disk_limit_mib
    if snapshot is not None:
        guest_mib = snapshot.memory_bytes // _MIB
        memory_mib = min(memory_mib or guest_mib, guest_mib)
        disk_mib = disk_mib or snapshot.disk_bytes // _MIB
    return Amounts(
        sandboxes=1,
        vcpus=0 if snapshot is None else snapshot.vcpus,
        memory_mib=memory_mib or 0,
        disk_mib=disk_mib or 0,
    )


def most_stored_bytes(snapshot: Snapshot, disk_limit_mib: int | None) -> int:
    """Return the most that a snapshot of a machine can take: all of its memory, and of its disk.

    Args:
        snapshot: What the machine goes back to, or is to become.
        disk_limit_mib: Most that it may write to its disk; None for no limit.
    """
    disk_bytes = snapshot.disk_bytes
    if disk_limit_mib is not None:
        disk_bytes = min(disk_bytes, disk_limit_mib * _MIB)
    return snapshot.memory_bytes + disk_bytes


def either(
    first: Callable[[Tenant], bool] | None, second: Callable[[Tenant], bool]
) -> Callable[[Tenant], bool]:
    """Return what gives up something of the one kind, or else of the other."""
    if first is None:
        return second
    before = first
    return lambda tenant: before(tenant) or second(tenant)


def seed_key(pid: int) -> str:
    """Return under what a seed is counted; its siblings share it."""
    return f"seed:{pid}"


def stored(size_bytes: int) -> Amounts:
    """Return how a snapshot of this size counts."""
    return Amounts(snapshot_mib=-(-size_bytes // _MIB))
