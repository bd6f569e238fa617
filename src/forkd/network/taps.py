"""Make and remove the links that a plan describes; every function may block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.errors import ForkdError
from forkd.host import netlink
from forkd.host.netlink import Ends
from forkd.network.plan import PREFIX_LENGTH, PREFIX_LENGTH_V6

if TYPE_CHECKING:
    from forkd.network.plan import Plan, Slot


def create(slot: Slot) -> None:
    """Make a link's tap, isolated and with the host's addresses, or nothing.

    Raises:
        HostError: The kernel refused.
    """
    netlink.add_tap(slot.tap)
    try:
        prepare(slot)
    except ForkdError:
        netlink.remove(slot.tap)
        raise


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


def remove(slot: Slot) -> None:
    """Remove a link's tap; one that does not exist is fine.

    Raises:
        HostError: The kernel refused.
    """
    netlink.remove(slot.tap)


def left_over(plan: Plan, in_use: set[str]) -> tuple[str, ...]:
    """Return the taps of this plan's kind that are not in use."""
    return tuple(name for name in netlink.names() if plan.is_ours(name) and name not in in_use)


def _set_up(slot: Slot) -> None:
    ends = [Ends(slot.host, slot.guest, PREFIX_LENGTH)]
    if slot.ipv6:
        ends.append(Ends(slot.host_v6, slot.guest_v6, PREFIX_LENGTH_V6))
    netlink.set_up(slot.tap, slot.mac, ends)
