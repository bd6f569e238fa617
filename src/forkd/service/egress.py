"""What sandboxes reach of the world: their walls, the resolver that they ask, the egress proxy.

They are there from the first sandbox with a network on, so that a host without packet filter can do
all else, until there is neither such a sandbox nor a slot that is ready for one.  A resolver or a
proxy that ends by itself ends the daemon, which is started anew: names would not be answered any
more, and nobody would know why.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from forkd.errors import ForkdError
from forkd.host import files
from forkd.model.network import NetworkStatus, RefusedName
from forkd.network.names import Asker, RefusedNames
from forkd.network.proxy import Client, Proxy
from forkd.network.ranges import check
from forkd.network.resolver import (
    RESOLV_CONF,
    RESOLV_CONF_BYTES_MAX,
    Resolver,
    upstreams_of,
)
from forkd.network.upstream import Upstreams
from forkd.network.walls import Walls
from forkd.service.supervision import TaskKind

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from forkd.model.network import NetworkPolicy
    from forkd.network.plan import Plan
    from forkd.network.questions import Upstream
    from forkd.network.rules import Opening, Wall
    from forkd.service.supervision import Supervisor
    from forkd.service.vault import Vault

WEB_PORTS = frozenset({80, 443})
"""To which ports connections go by the operator's proxy, if there is one."""


class Egress:
    """What stands around sandboxes with a network.

    Args:
        plan: Which taps and addresses there may be.
        tasks: Runs the resolver.
        upstreams: Whom the resolver asks; none for those of the host's resolv.conf.
        vault: Where the secrets of sandboxes are; None if none has any.
        outward: Makes the proxy's connections to the world; None for straight ones.
    """

    def __init__(
        self,
        plan: Plan,
        tasks: Supervisor,
        upstreams: Sequence[Upstream] = (),
        vault: Vault | None = None,
        outward: Upstreams | None = None,
    ) -> None:
        self._plan = plan
        self._walls = Walls(plan)
        self._tasks = tasks
        self._given = tuple(upstreams)
        self._upstreams: tuple[Upstream, ...] = self._given
        self.resolver = Resolver(self._find, self._open_for, lambda: self._upstreams, self._spawn)
        self._vault = vault
        self._outward = outward or Upstreams()
        self.proxy = Proxy(self._find_client, self._outward, self._spawn_proxied)
        self._changing = asyncio.Lock()
        self._started = False
        self._by_tap: dict[str, tuple[Wall, RefusedNames]] = {}
        self._taps: dict[str, str] = {}

    def check(self, policy: NetworkPolicy) -> None:
        """Return if walls can hold a policy, as `ranges.check` says.

        Raises:
            InvalidRequest: They cannot, or one of its rules would never allow anything.
        """
        check(policy, (self._plan.pool, self._plan.pool_v6))

    async def begin(self, walls: Sequence[Wall]) -> None:
        """Put up the walls of what an earlier daemon forked; remove what it left beside.

        Raises:
            HostError: The kernel refused.
        """
        async with self._changing:
            walls = list(map(self._led, walls))
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
            walls = list(map(self._led, walls))
            await self._start()
            try:
                await asyncio.to_thread(self._walls.put, walls)
                self._note(walls)
            finally:
                self._rest()

    async def take(self, taps: Sequence[str]) -> None:
        """Take away what stands around taps that are gone; those that have nothing are fine.

        Raises:
            HostError: The kernel refused.
        """
        if not taps:
            return
        async with self._changing:
            await asyncio.to_thread(self._walls.take, taps)
            for tap in taps:
                self._forget(tap)
            self._rest()

    async def guard(self, taps: Sequence[str]) -> None:
        """Drop what comes from taps, or is forwarded there, until they have a wall or are taken.

        Raises:
            HostError: The kernel refused.
        """
        async with self._changing:
            await asyncio.to_thread(self._walls.guard, taps)

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
        """End resolver and proxy; walls stay for as long as their sandboxes."""
        self.resolver.close()
        self.proxy.close()

    async def _start(self) -> None:
        if not self._given and not self._by_tap:
            text = await asyncio.to_thread(files.read, RESOLV_CONF, RESOLV_CONF_BYTES_MAX)
            self._upstreams = upstreams_of((text or b"").decode(errors="replace"))
        if self._started:
            return
        await self.resolver.start(ipv6=self._plan.ipv6)
        try:
            self.proxy.listen()
        except ForkdError:
            self.resolver.close()
            raise
        self._started = True
        self._walls.listen_at(self.resolver.port, self.proxy.port)
        self._tasks.run(TaskKind.RESOLVER, self._serve(), "names", vital=True)
        self._tasks.run(TaskKind.PROXY, self.proxy.serve(), "egress", vital=True)

    def _rest(self) -> None:
        """End resolver and proxy if nobody can ask them, now or with a slot that is ready."""
        if not self._walls.are_built:
            self.resolver.close()
            self.proxy.close()
            self._started = False

    async def _serve(self) -> None:
        await self.resolver.until_ended()

    def _note(self, walls: Iterable[Wall]) -> None:
        for wall in walls:
            before = self._by_tap.get(wall.slot.tap)
            names = RefusedNames()
            if before is not None and before[0].lease == wall.lease:
                names = before[1]
            goes_on = before is not None and before[0].mark == wall.mark and not wall.held
            self._forget(wall.slot.tap, ends=not goes_on)
            self._by_tap[wall.slot.tap] = wall, names
            self._taps |= dict.fromkeys(_addresses(wall), wall.slot.tap)

    def _forget(self, tap: str, *, ends: bool = True) -> None:
        """Forget a wall, and end what its sandbox has open by the proxy, unless that goes on."""
        if ends:
            self.proxy.end(tap)
        before = self._by_tap.pop(tap, None)
        if before is None:
            return
        for address in _addresses(before[0]):
            if self._taps.get(address) == tap:
                del self._taps[address]

    def _led(self, wall: Wall) -> Wall:
        """Return a wall with the ports of which the proxy takes what goes there."""
        led: frozenset[int] = frozenset()
        if wall.use is not None and self._vault is not None:
            led = self._vault.ports(wall.use)
        if self._outward.leads_all and wall.policy.forwards:
            led |= WEB_PORTS
        return replace(wall, led=led)

    def _find_client(self, address: str) -> Client | None:
        tap = self._taps.get(address)
        if tap is None:
            return None
        wall, _ = self._by_tap[tap]
        reaches = partial(self._walls.permits, wall)
        use, vault = wall.use, self._vault
        if use is None or vault is None:
            return Client(tap, wall.tenant, wall.policy, wall.held, reaches)
        return Client(
            tap,
            wall.tenant,
            wall.policy,
            wall.held,
            reaches,
            lambda: vault.bound(use),
            use.root,
            lambda name: vault.authority(use.root).leaf(name),
        )

    def _find(self, address: str) -> Asker | None:
        tap = self._taps.get(address)
        if tap is None:
            return None
        wall, names = self._by_tap[tap]
        return Asker(
            lease=wall.lease,
            tap=wall.slot.tap,
            tenant=wall.tenant,
            mark=wall.mark,
            policy=wall.policy,
            held=wall.held,
            refused=names,
        )

    async def _open_for(self, openings: Sequence[Opening], seconds: int, mark: int) -> None:
        await asyncio.to_thread(self._walls.open_for, openings, seconds, mark)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        self._tasks.run(TaskKind.QUESTION, work, "of a sandbox")

    def _spawn_proxied(self, work: Coroutine[object, object, None]) -> None:
        self._tasks.run(TaskKind.PROXIED, work, "connection of a sandbox")


def _addresses(wall: Wall) -> tuple[str, str]:
    return wall.slot.guest, wall.slot.guest_v6
