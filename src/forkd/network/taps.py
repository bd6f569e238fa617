"""Make and remove the links that a plan describes; every function may block.

Many are made or removed at once in less time than one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.errors import ForkdError
from forkd.host import netlink
from forkd.host.netlink import Ends, Link
from forkd.network.plan import PREFIX_LENGTH, PREFIX_LENGTH_V6

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forkd.network.plan import Plan, Slot


def create(slots: Sequence[Slot]) -> dict[str, ForkdError]:
    """Make links' taps, isolated and with the host's addresses; return what failed, by tap.

    Nothing is there of those that failed, unless the kernel does not remove them either.
    """
    failed: dict[str, ForkdError] = {}
    made = []
    for slot in slots:
        try:
            netlink.add_tap(slot.tap)
            made.append(slot)
            netlink.isolate(slot.tap, ipv6=slot.ipv6)
        except ForkdError as error:
            failed[slot.tap] = error
    whole = [slot for slot in made if slot.tap not in failed]
    try:
        failed |= netlink.set_up(map(_link, whole)) if whole else {}
    except ForkdError as error:
        failed |= {slot.tap: error for slot in whole}
    unfinished = [slot for slot in made if slot.tap in failed]
    try:
        remove(unfinished)
    except ForkdError as error:
        failed |= {slot.tap: error for slot in unfinished}
    return failed


def prepare(slot: Slot) -> None:
    """Isolate a link's tap, which is down and new, give it the host's addresses and set it up.

    Raises:
        HostError: The kernel refused.
    """
    netlink.isolate(slot.tap, ipv6=slot.ipv6)
    _set_up(slot)


def readdress(slot: Slot) -> None:
    """Give a link's tap, which has other addresses, those that its slot says; idempotent.

    Raises:
        HostError: The kernel refused.
    """
    netlink.clear_addresses(slot.tap)
    _set_up(slot)


def remove(slots: Iterable[Slot]) -> None:
    """Remove links' taps; those that do not exist are fine.

    Raises:
        HostError: The kernel refused.
    """
    netlink.remove([slot.tap for slot in slots])


def left_over(plan: Plan, in_use: set[str]) -> tuple[str, ...]:
    """Return the taps of this plan's kind that are not in use."""
    return tuple(name for name in netlink.names() if plan.is_ours(name) and name not in in_use)


def _set_up(slot: Slot) -> None:
    for error in netlink.set_up([_link(slot)]).values():
        raise error


def _link(slot: Slot) -> Link:
    ends = [Ends(slot.host, slot.guest, PREFIX_LENGTH)]
    if slot.ipv6:
        ends.append(Ends(slot.host_v6, slot.guest_v6, PREFIX_LENGTH_V6))
    return Link(slot.tap, slot.mac, tuple(ends))
