"""What sandboxes reach of the world: their walls, and the resolver that they ask.

Both are there while there is a sandbox with a network, so that a host without packet filter can do
all else.  A resolver that ends by itself ends the daemon, which is started anew: names would not
be answered any more, and nobody would know why.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.host import files
from forkd.model.network import NetworkStatus, RefusedName
from forkd.network.names import Asker, RefusedNames
from forkd.network.resolver import Resolver, upstreams_of
from forkd.network.walls import Walls
from forkd.service.supervision import TaskKind

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from forkd.network.plan import Plan
    from forkd.network.resolver import Upstream
    from forkd.network.rules import Opening, Wall
    from forkd.service.supervision import Supervisor

RESOLV_CONF = Path("/etc/resolv.conf")

_RESOLV_CONF_BYTES_MAX = 64 << 10


class Egress:
    """What stands around sandboxes with a network.

    Args:
        plan: Which taps and addresses there may be.
        tasks: Runs the resolver.
        upstreams: Whom the resolver asks; none for those of the host's resolv.conf.
    """

    def __init__(self, plan: Plan, tasks: Supervisor, upstreams: Sequence[Upstream] = ()) -> None:
        self._ipv6 = plan.ipv6
        self._walls = Walls(plan)
        self._tasks = tasks
        self._given = tuple(upstreams)
        self._upstreams: tuple[Upstream, ...] = self._given
        self.resolver = Resolver(self._find, self._open_for, lambda: self._upstreams, self._spawn)
        self._changing = asyncio.Lock()
        self._started = False
        self._by_tap: dict[str, tuple[Wall, RefusedNames]] = {}
        self._taps: dict[str, str] = {}

    async def begin(self, walls: Sequence[Wall]) -> None:
        """Put up the walls of what an earlier daemon forked; remove what it left beside.

        Raises:
            HostError: The kernel refused.
        """
        async with self._changing:
            if walls:
                await self._start()
            await asyncio.to_thread(self._walls.begin, walls)
            self._note(walls)

    async def put(self, walls: Sequence[Wall]) -> None:
        """Put up walls, in place of those that their taps have.

        Raises:
            InvalidRequest: The rules of one overlap in too many ways.
            HostError: The kernel refused.
        """
        if not walls:
            return
        async with self._changing:
            await self._start()
            try:
                await asyncio.to_thread(self._walls.put, walls)
                self._note(walls)
            finally:
                self._rest()

    async def take(self, walls: Sequence[Wall]) -> None:
        """Take walls away, once the taps are gone; those that are away are fine.

        Raises:
            HostError: The kernel refused.
        """
        if not walls:
            return
        async with self._changing:
            await asyncio.to_thread(self._walls.take, [each.slot.tap for each in walls])
            for wall in walls:
                self._forget(wall.slot.tap)
            self._rest()

    async def limit(self, wall: Wall) -> None:
        """Give a wall that stands another bandwidth.

        Raises:
            HostError: The kernel refused.
        """
        async with self._changing:
            await asyncio.to_thread(self._walls.limit, wall)

    async def status(self, wall: Wall) -> NetworkStatus:
        """Return what a sandbox may reach, and what it was refused.

        Raises:
            HostError: The kernel does not say.
        """
        refusals = await asyncio.to_thread(self._walls.refusals, wall)
        _, names = self._by_tap.get(wall.slot.tap, (wall, RefusedNames()))
        listed = sorted(names.counts.items(), key=lambda each: -each[1])
        return NetworkStatus(
            policy=wall.policy,
            held=wall.held,
            address=wall.slot.guest,
            gateway=wall.slot.host,
            address_v6=wall.slot.guest_v6 if wall.slot.ipv6 else None,
            gateway_v6=wall.slot.host_v6 if wall.slot.ipv6 else None,
            refused_packets=refusals.packets,
            refused_destinations=refusals.destinations,
            refused_questions=names.total,
            refused_names=tuple(RefusedName(n, str(why), count) for (n, why), count in listed),
        )

    def close(self) -> None:
        """End the resolver; walls stay for as long as their sandboxes."""
        self.resolver.close()

    async def _start(self) -> None:
        if self._started:
            return
        if not self._given:
            text = await asyncio.to_thread(files.read, RESOLV_CONF, _RESOLV_CONF_BYTES_MAX)
            self._upstreams = upstreams_of((text or b"").decode(errors="replace"))
        await self.resolver.start(ipv6=self._ipv6)
        self._started = True
        self._walls.listen_at(self.resolver.port)
        self._tasks.run(TaskKind.RESOLVER, self._serve(), "names", vital=True)

    def _rest(self) -> None:
        """End the resolver if nobody can ask it."""
        if not self._by_tap:
            self.resolver.close()
            self._started = False

    async def _serve(self) -> None:
        await self.resolver.until_ended()

    def _note(self, walls: Iterable[Wall]) -> None:
        for wall in walls:
            before = self._by_tap.get(wall.slot.tap)
            names = RefusedNames()
            if before is not None and before[0].lease == wall.lease:
                names = before[1]
            self._forget(wall.slot.tap)
            self._by_tap[wall.slot.tap] = wall, names
            self._taps[wall.slot.guest] = self._taps[wall.slot.guest_v6] = wall.slot.tap

    def _forget(self, tap: str) -> None:
        before = self._by_tap.pop(tap, None)
        if before is None:
            return
        for address in (before[0].slot.guest, before[0].slot.guest_v6):
            if self._taps.get(address) == tap:
                del self._taps[address]

    def _find(self, address: str) -> Asker | None:
        tap = self._taps.get(address)
        if tap is None:
            return None
        wall, names = self._by_tap[tap]
        return Asker(wall.slot.tap, wall.policy, wall.held, names)

    async def _open_for(self, openings: Sequence[Opening], seconds: int) -> None:
        await asyncio.to_thread(self._walls.open_for, openings, seconds)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        self._tasks.run(TaskKind.QUESTION, work, "of a sandbox")
