"""Network slots: which are used, which are ready, and how they are made and removed.

A slot that is *ready* is complete and no sandbox's: its tap is isolated, has the host's addresses,
is up, and is guarded by the packet filter, which drops what comes from there or is forwarded there.
Where machines are given their taps open, it is open already: with that the kernel brings the link
up, and says so to the link's other end, which is better heard by nobody than by a guest.
A fork takes those that are ready and makes what is missing; as many are made again in the
background.  There are none before the first fork with a network, and none after the daemon has
stopped.

A slot that is given back is removed, and not made ready again: a machine has had the tap, and may
have set of it what nothing else would set back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import TYPE_CHECKING

from forkd.errors import Conflict, ForkdError
from forkd.host import files, tuntap
from forkd.network import taps
from forkd.service.gathering import Gathering
from forkd.service.supervision import TaskKind, to_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forkd.network.plan import Plan, Slot
    from forkd.service.egress import Egress
    from forkd.service.supervision import Supervisor, Task

AT_ONCE = 16
"""How many slots are made in the background at once: a fork may have to wait for that."""

log = logging.getLogger(__name__)


class Slots:
    """The network slots of one host.

    Args:
        plan: Which there are.
        egress: What stands around them.
        tasks: Makes them in the background.
        kept: How many are kept ready; 0 for none.
        opened: Whether their taps are kept open.
    """

    def __init__(
        self, plan: Plan, egress: Egress, tasks: Supervisor, kept: int = 0, *, opened: bool = False
    ) -> None:
        self._plan = plan
        self._egress = egress
        self._tasks = tasks
        self._kept = kept
        self._opened = opened
        self._descriptors: dict[str, int] = {}
        self._used: Counter[int] = Counter()
        self._complete: set[int] = set()  # made ahead, and no machine has had them
        self._making: frozenset[int] = frozenset()
        self._busy = asyncio.Lock()
        self._filling: Task[None] | None = None
        self._closed = False
        self._leaving = Gathering(self._remove)

    @property
    def ready(self) -> tuple[int, ...]:
        """Which slots are ready, by index."""
        return tuple(sorted(self._complete.difference(self._used)))

    @property
    def used(self) -> int:
        """How many are used, a promoted sandbox's address and tap apart."""
        return len(self._used)

    @property
    def is_filling(self) -> bool:
        """Whether some are being made in the background."""
        return self._filling is not None

    def of(self, index: int, tap_index: int | None = None, *, ipv6: bool = True) -> Slot:
        """Return the slot at an index, with the tap of another if need be."""
        slot = self._plan.slot(index, tap_index)
        return slot if ipv6 else slot.only_v4()

    def reserve(self, count: int, *, ipv6: bool = True) -> tuple[Slot, ...]:
        """Return slots that are exclusive until they are freed; `make` makes what is not ready.

        Args:
            count: How many.
            ipv6: Whether they may have IPv6.  Without, others go first than those that are ready,
                which have it.

        Raises:
            CapacityError: There are not so many.
        """
        self._plan.free(count, self._used)  # raises
        ready = self.ready
        ours = (*ready, *sorted(self._making.difference(self._used)))
        found = list(ready[:count]) if ipv6 else []
        found += self._unmade(count - len(found))
        found += [index for index in ours if index not in found][: count - len(found)]
        slots = tuple(self.of(index, ipv6=ipv6) for index in found)
        for slot in slots:
            self.use(slot)
        return slots

    def use(self, slot: Slot) -> None:
        """Note that a slot has one user more."""
        self._used.update({slot.index, slot.tap_index})

    def free(self, slot: Slot) -> None:
        """Note that a slot has one user less."""
        for index in {slot.index, slot.tap_index}:
            self._used[index] -= 1
            if self._used[index] == 0:
                del self._used[index]

    def open_tap(self, tap: str) -> int:
        """Return a descriptor, the caller's, of the tap of a complete slot; blocks.

        Raises:
            HostError: There is none, or it is in use.
            CapacityError: There are too many open files.
        """
        descriptor = self._descriptors.pop(tap, None)
        if descriptor is None:
            return tuntap.open_tap(tap)
        try:
            tuntap.drain(descriptor)
        except ForkdError:
            files.close(descriptor)
            raise
        return descriptor

    def close_taps(self, slots: Iterable[Slot]) -> None:
        """Let go of taps that are kept open, for whoever opens them or before they are removed."""
        for slot in slots:
            if (descriptor := self._descriptors.pop(slot.tap, None)) is not None:
                files.close(descriptor)

    async def make(self, slots: Sequence[Slot]) -> dict[str, ForkdError]:
        """Have slots complete that were reserved; return what failed, by tap."""
        indexes = {slot.tap_index for slot in slots}
        if indexes & self._making:
            async with self._busy:
                pass  # they are complete now, or failed
        other = [s for s in slots if s.tap_index in self._complete and s.ipv6 != self._plan.ipv6]
        missing = [slot for slot in slots if slot.tap_index not in self._complete] + other
        self._complete -= indexes
        if not missing:
            return {}

        def create() -> dict[str, ForkdError]:
            self.close_taps(other)
            try:
                taps.remove(other)
            except ForkdError as error:
                return {slot.tap: error for slot in missing}
            return taps.create(missing)

        return await asyncio.to_thread(create)

    async def remove(self, slots: Sequence[Slot]) -> None:
        """Remove slots with what stands around them, and others that leave at the same time.

        Raises:
            HostError: The kernel refused; this can be called again.
        """
        if slots:
            await self._leaving.do(slots)

    def refill(self) -> None:
        """Have as many slots ready as are kept, in the background."""
        if self._closed or self._filling is not None or len(self.ready) >= self._kept:
            return
        with contextlib.suppress(Conflict):  # the daemon is stopping
            self._filling = self._tasks.run(TaskKind.FILL, self._fill(), "network slots")
            self._filling.when_done(self._note_filled)

    async def close(self) -> None:
        """Remove those that are ready; no more are made ready from now on."""
        self._closed = True
        if self._filling is not None:
            await self._filling.cancel()
        slots = [self.of(index) for index in self.ready]
        for slot in slots:
            self.use(slot)
        try:
            await self.remove(slots)
        except ForkdError as error:
            log.warning("network slots not removed", extra={"error": str(error)})
        for slot in slots:
            self.free(slot)

    async def _fill(self) -> None:
        more = True
        while more:
            async with self._busy:
                more = await to_end(self._make_ready())

    async def _make_ready(self) -> bool:
        """Make some slots that are missing; return whether there were any.

        Raises:
            HostError: The kernel refused one.
        """
        made = self._unmade(min(AT_ONCE, self._kept - len(self.ready)))
        if not made:
            return False
        slots = [self.of(index) for index in made]
        self._making = frozenset(made)
        try:
            await self._egress.guard([slot.tap for slot in slots])
            failed = await asyncio.to_thread(self._create_ready, slots)
            self._complete.update(slot.index for slot in slots if slot.tap not in failed)
            if failed:
                await self._egress.take(tuple(failed))
                raise next(iter(failed.values()))
        finally:
            self._making = frozenset()
        return True

    def _create_ready(self, slots: Sequence[Slot]) -> dict[str, ForkdError]:
        failed = taps.create(slots)
        for slot in slots if self._opened else ():
            if slot.tap not in failed:
                with contextlib.suppress(ForkdError):  # then the fork opens it, or says why not
                    self._descriptors[slot.tap] = tuntap.open_tap(slot.tap)
        return failed

    def _unmade(self, count: int) -> tuple[int, ...]:
        """Return slots that are not there yet, as many as there are of so many."""
        taken = self._used.keys() | self._complete | self._making
        return self._plan.free(max(0, min(count, self._plan.slots - len(taken))), taken)

    def _note_filled(self) -> None:
        self._filling = None

    async def _remove(self, slots: Sequence[Slot]) -> None:
        self.close_taps(slots)
        await asyncio.to_thread(taps.remove, slots)
        self._complete.difference_update(slot.tap_index for slot in slots)
        await self._egress.take([slot.tap for slot in slots])
