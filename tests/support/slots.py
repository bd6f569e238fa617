"""Which network slot a sandbox has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forkd.model.sandbox import Sandbox
    from forkd.network.plan import Plan, Slot


def slot_of(plan: Plan, sandbox: Sandbox) -> Slot:
    """Return the slot with the address of a sandbox; of one that was promoted, not its tap's."""
    assert sandbox.address is not None
    return next(each for each in map(plan.slot, range(plan.slots)) if each.guest == sandbox.address)
