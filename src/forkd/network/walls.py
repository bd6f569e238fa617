"""The walls around sandboxes, in the kernel; every method may block, and be called in any thread.

The table is there while there is a sandbox with a link, or a link that is kept ready for one, and
after a daemon that was killed: what it forked lives on behind it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from forkd.errors import CapacityError, HostError
from forkd.host import netlink, nftables
from forkd.model.network import Protocol, RefusedDestination
from forkd.network import rules
from forkd.network.ranges import is_own, permits
from forkd.network.rules import Opening, Roused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from forkd.network.plan import Plan
    from forkd.network.rules import Wall

log = logging.getLogger(__name__)

OPENINGS_MAX = 4_096
"""Most addresses and ports that names may have opened for one sandbox at once."""

OPENING_GRACE_S = 60.0
"""How long a connection that was allowed by a name may wait to be taken by the egress proxy."""

FORMER_MAX = 64
"""Most policies of one sandbox whose connections are decided on again when it has another; those of
an earlier one are refused until the sandbox sends something."""

REFUSED_LISTED_MAX = 256
"""Most destinations that are listed of those that a sandbox was refused; the most asked for."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """What a sandbox was refused.

    Attributes:
        packets: How many packets, since its policy was first set on this host.
        destinations: Where they went to, the most asked for first.
    """

    packets: int = 0
    destinations: tuple[RefusedDestination, ...] = ()


class Walls:
    """The walls of one daemon.

    Args:
        plan: Which taps are ours.
        clock: Tells monotonic time, in seconds.
    """

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.monotonic) -> None:
        self._plan = plan
        self._clock = clock
        self._lock = threading.Lock()
        self._walls: dict[str, Wall] = {}
        self._openings: dict[str, dict[Opening, float]] = {}
        self._guarded: frozenset[str] = frozenset()
        self._built = False
        self._woken = False
        self._port = 0
        self._proxy_port = 0

    @property
    def are_built(self) -> bool:
        """Whether walls can be put up at once: while there are walls, or taps to guard after them.

        The resolver's and the proxy's ports are named in them.
        """
        return self._built

    def listen_at(self, port: int, proxy_port: int = 0) -> None:
        """Say where the resolver and the egress proxy listen, before any wall is put up."""
        self._port, self._proxy_port = port, proxy_port

    def begin(self, walls: Iterable[Wall]) -> None:
        """Put up what an earlier daemon left, or remove it if nothing of it is needed.

        What names had opened is closed until they are asked for again.

        Args:
            walls: All that there are.

        Raises:
            HostError: The kernel refused.
        """
        with self._lock:
            walls = list(walls)
            if not walls and not nftables.is_available():
                return
            roused = self._read_roused()
            if not walls:
                self._remove_unneeded(roused)
                return
            self._build(walls, roused)

    def put(self, walls: Iterable[Wall]) -> None:
        """Put up walls, in place of those that their taps have: all, or none.

        Raises:
            InvalidRequest: The rules of one overlap in too many ways.
            HostError: The kernel refused.
        """
        with self._lock:
            new = [_with_former(each, self._walls.get(each.slot.tap)) for each in walls]
            if not self._built:
                self._build(new, Roused())
                return
            old = [self._walls[each.slot.tap] for each in new if each.slot.tap in self._walls]
            openings = [each for wall in old for each in self._openings.get(wall.slot.tap, ())]
            gone = rules.take(self._plan, old, openings) if old else ""
            kept = self._still_open(new)
            again = "".join(rules.open_for(self._plan, each, left) for left, each in kept.items())
            nftables.run(gone + rules.put(self._plan, new) + again)
            self._note(new)
            for left, each in kept.items():
                for opening in each:
                    self._openings.setdefault(opening.tap, {})[opening] = self._clock() + left

    def guard(self, taps: Iterable[str]) -> None:
        """Drop what comes from taps, or is forwarded there, until they have a wall or are taken.

        Raises:
            HostError: The kernel refused.
        """
        with self._lock:
            new = frozenset(taps).difference(self._walls)
            commands = rules.guard(self._plan, new)
            if not self._built and not self._guarded:
                commands = rules.build(self._plan, 0) + commands
            nftables.run(commands)
            self._guarded |= new

    def take(self, taps: Iterable[str]) -> None:
        """Take the walls of taps that are gone away, or their guard; those without are fine.

        Raises:
            HostError: The kernel refused.
        """
        with self._lock:
            taps = set(taps)
            old = [wall for tap, wall in self._walls.items() if tap in taps]
            guarded = self._guarded - taps
            if not old and guarded == self._guarded:
                return
            last = len(old) == len(self._walls)
            if last and not guarded:
                self._take_all()
            else:
                openings = [each for wall in old for each in self._openings.get(wall.slot.tap, ())]
                gone = rules.take(self._plan, old, openings) + rules.forget(self._plan, old)
                gone += rules.unguard(self._plan, self._guarded & taps)
                if last and old:  # first what can be done again, if the kernel refuses
                    self._rest(self._read_roused())
                    gone += rules.rest(self._plan)
                nftables.run(gone)
            self._guarded = guarded
            for wall in old:
                del self._walls[wall.slot.tap]
                self._openings.pop(wall.slot.tap, None)
            netlink.forget_connections(mark for wall in old for mark in _marks(wall))

    def _take_all(self) -> None:
        """Take the table away, with all that is in it."""
        roused = self._read_roused() if self._built else Roused()
        nftables.run(rules.remove(self._plan))
        if self._built:
            self._built = False
            self._rest(roused)

    def limit(self, wall: Wall) -> None:
        """Give the wall of a tap that has one another bandwidth; what names opened stays open.

        Raises:
            HostError: The kernel refused.
        """
        with self._lock:
            before = self._walls.get(wall.slot.tap)
            if before is None:
                return  # it ended meanwhile
            after = replace(before, bandwidth_mbit=wall.bandwidth_mbit)
            nftables.run(rules.limit(self._plan, before, after))
            self._walls[wall.slot.tap] = after

    def open_for(self, openings: Iterable[Opening], seconds: int, mark: int) -> None:
        """Open addresses for a time from now on; those that are open for longer stay so.

        Args:
            openings: What is opened.
            seconds: For how long.
            mark: Of the walls whose policy allows it; where another stands by now, or one that is
                held, nothing is opened.

        Raises:
            CapacityError: The sandbox has too many open.
            HostError: The kernel refused.
        """
        with self._lock:
            now = self._clock()
            later = now + seconds
            new: list[Opening] = []
            for each in openings:
                wall = self._walls.get(each.tap)
                if wall is None or wall.held or wall.mark != mark:
                    continue  # it ended meanwhile, or may not any more
                opened = self._openings.setdefault(each.tap, {})
                if opened.get(each, 0.0) < later:
                    new.append(each)
            for tap in {each.tap for each in new}:
                live = {o: until for o, until in self._openings[tap].items() if until > now}
                self._openings[tap] = live
                if len(live.keys() | set(new)) > OPENINGS_MAX:
                    raise CapacityError(f"{tap} has {OPENINGS_MAX} addresses open", tap=tap)
            if new:
                nftables.run(rules.open_for(self._plan, new, seconds))
                for each in new:
                    self._openings[each.tap][each] = later

    def permits(self, wall: Wall, address: str, port: int) -> bool:
        """Whether a sandbox may open a TCP connection to an address that is not its link's.

        The packet filter decides the same, from the same rules; this is for connections that the
        host makes in a sandbox's place.

        Args:
            wall: The sandbox's wall; nothing is permitted if another stands there by now.
            address: To which address.
            port: To which port.

        Raises:
            HostError: The kernel does not say whose address it is.
        """
        tap, to = wall.slot.tap, ip_address(address)
        standing = self._walls.get(tap)
        if standing is None or standing.held or standing.mark != wall.mark:
            return False
        if is_own(to) or self._plan.holds(to) or netlink.is_taken_here(address):
            return False
        if permits(wall.policy, to, Protocol.TCP, port):
            return True
        opened = self._openings.get(tap, {})
        since = self._clock() - OPENING_GRACE_S
        return any(
            opened.get(Opening(tap, to, Protocol.TCP, each), since) > since for each in (port, None)
        )

    def refusals(self, wall: Wall) -> Refusals:
        """Return what a sandbox was refused.

        Raises:
            HostError: The kernel does not say.
        """
        if not self._built:
            return Refusals()
        packets = sum(each.packets for each in self._counted("refusals", wall.id))
        found = self._counted("refused4", wall.id) + self._counted("refused6", wall.id)
        found.sort(key=lambda each: -each.packets)
        return Refusals(packets, tuple(found[:REFUSED_LISTED_MAX]))

    def _remove_unneeded(self, roused: Roused) -> None:
        try:
            nftables.run(rules.remove(self._plan))
            self._rest(roused)
        except HostError as error:  # without rights, or a packet filter, there is nothing to remove
            log.info("walls not removed", extra={"error": str(error)})

    def _build(self, walls: list[Wall], roused: Roused) -> None:
        commands = rules.build(self._plan, self._port, self._proxy_port)
        commands += rules.guard(self._plan, self._guarded) + rules.put(self._plan, walls)
        nftables.run(commands + rules.rouse(self._plan, roused))
        self._built = True
        # Those that an earlier resolver answered would be led to where it listened.
        netlink.forget_connections([rules.asked_mark(self._plan)])
        self._woken = roused.ipv6
        self._walls.clear()
        self._openings.clear()
        self._note(walls)

    def _still_open(self, walls: list[Wall]) -> dict[int, list[Opening]]:
        """Return what stays open under new walls of the same sandboxes, by how many seconds."""
        now, found = self._clock(), dict[int, list[Opening]]()
        for wall in walls:
            before = self._walls.get(wall.slot.tap)
            if before is None or before.lease != wall.lease:
                continue
            for each, until in self._openings.get(wall.slot.tap, {}).items():
                if until > now and each.is_allowed(wall.policy):
                    found.setdefault(math.ceil(until - now), []).append(each)
        return found

    def _note(self, walls: list[Wall]) -> None:
        for wall in walls:
            self._walls[wall.slot.tap] = wall
            self._openings.pop(wall.slot.tap, None)
        self._guarded = self._guarded.difference(self._walls)
        forwarding = [wall.slot.tap for wall in walls if wall.policy.forwards]
        if forwarding:
            others = netlink.not_forwarding(self._plan.is_ours)
            nftables.run(rules.rouse(self._plan, Roused(others)))
            netlink.forward(others, on=True)
            netlink.forward(forwarding, on=True)
        if any(wall.slot.ipv6 and wall.policy.forwards_ipv6 for wall in walls):
            self._forward_ipv6()

    def _forward_ipv6(self) -> None:
        """Have the host forward IPv6 and keep what it learns of routers, unless it does already."""
        if not self._woken and netlink.forwards_ipv6():
            return
        learning = netlink.learning(self._plan.is_ours)
        if self._woken and not learning:
            return
        nftables.run(rules.rouse(self._plan, Roused(ipv6=True, learning=learning)))
        self._woken = True
        netlink.forward_ipv6(learning)

    def _rest(self, roused: Roused) -> None:
        """Have nothing forward because of us."""
        self._woken = False
        netlink.forward(roused.links, on=False)
        if roused.ipv6:
            netlink.stop_forwarding_ipv6(roused.learning)

    def _read_roused(self) -> Roused:
        """Return what forwards because of us, this daemon or an earlier one."""
        links, learning, woken = map(self._read_set, rules.ROUSED_SETS)
        return Roused(links, bool(woken), learning)

    def _read_set(self, name: str) -> tuple[str, ...]:
        try:
            found = nftables.read(f"list set inet {rules.table_name(self._plan)} {name}")
        except HostError:
            return ()  # there is no table, or it is of a daemon that had no such set
        return tuple(
            element for each in found if "set" in each for element in each["set"].get("elem", ())
        )

    def _counted(self, name: str, id_: int) -> list[RefusedDestination]:
        table = rules.table_name(self._plan)
        sets = [
            each["set"] for each in nftables.read(f"list set inet {table} {name}") if "set" in each
        ]
        elements = [each["elem"] for found in sets for each in found.get("elem", ())]
        return [_refused(each) for each in elements if _key(each)[0] == id_]


def _with_former(wall: Wall, before: Wall | None) -> Wall:
    """Return a wall with the marks of what its sandbox's connections were allowed by before."""
    if before is None or before.lease != wall.lease:
        return wall
    marks = [each for each in (*before.former, before.mark) if each != wall.mark]
    netlink.forget_connections(marks[:-FORMER_MAX])
    return replace(wall, former=tuple(dict.fromkeys(marks[-FORMER_MAX:])))


def _marks(wall: Wall) -> tuple[int, ...]:
    """Return the marks that connections of a wall's sandbox may bear."""
    allows = wall.policy.forwards or wall.policy.host
    return (*wall.former, wall.mark) if allows else wall.former


def _key(element: dict[str, Any]) -> list[Any]:
    value = element["val"]
    return value["concat"] if isinstance(value, dict) else [value]


def _refused(element: dict[str, Any]) -> RefusedDestination:
    packets = element["counter"]["packets"]
    _, address, protocol, port = (*_key(element), "0.0.0.0", "", 0)[:4]  # noqa: S104 - no address
    return RefusedDestination(str(ip_address(address)), str(protocol), port or None, packets)
