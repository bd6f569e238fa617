"""Make and remove the links that a plan describes; every function may block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.errors import ForkdError
from forkd.host import netlink
from forkd.network.plan import PREFIX_LENGTH

if TYPE_CHECKING:
    from forkd.network.plan import Plan, Slot


def create(slot: Slot) -> None:
    """Make a link's tap, isolated and with the host's address, or nothing.

    Raises:
        HostError: The kernel refused.
    """
    netlink.add_tap(slot.tap)
    try:
        netlink.isolate(slot.tap)
        netlink.set_up(slot.tap, slot.host, PREFIX_LENGTH)
    except ForkdError:
        netlink.remove(slot.tap)
        raise


def readdress(slot: Slot) -> None:
    """Give a link's tap, which has another address, the one that its slot says; idempotent.

    Raises:
        HostError: The kernel refused.
    """
    netlink.clear_addresses(slot.tap)
    netlink.set_up(slot.tap, slot.host, PREFIX_LENGTH)


def remove(slot: Slot) -> None:
    """Remove a link's tap; one that does not exist is fine.

    Raises:
        HostError: The kernel refused.
    """
    netlink.remove(slot.tap)


def left_over(plan: Plan, in_use: set[str]) -> tuple[str, ...]:
    """Return the taps of this plan's kind that are not in use."""
    return tuple(name for name in netlink.names() if plan.is_ours(name) and name not in in_use)
