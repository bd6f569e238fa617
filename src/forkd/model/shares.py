"""How tenants share one limited thing: none of them can take all of it.

A tenant may take until it has half of what the others leave.  So whatever one tenant does, the next
one still finds something, and the most that a single tenant can have is half.  Who may do anything
on the host needs no share, and may take all that is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forkd.model.caller import Tenant


class Shares:
    """So much of one thing, and which tenant has how much of it.

    Args:
        most: How much there is.

    Attributes:
        used: How much of it is taken.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._taken: dict[Tenant, int] = {}

    def of(self, tenant: Tenant) -> int:
        """Return how much a tenant has."""
        return self._taken.get(tenant, 0)

    def room(self, tenant: Tenant, *, whole: bool = False) -> int:
        """Return how much more a tenant may take.

        Args:
            tenant: Which one.
            whole: Without a share: all that is left.
        """
        left = self.most - self.used
        if whole:
            return left
        own = self.of(tenant)
        share = (left + own + 1) // 2
        return max(0, min(left, share - own))

    def take(self, tenant: Tenant, count: int = 1, *, whole: bool = False) -> bool:
        """Take so much for a tenant, if it may have it; return whether it may."""
        if count > self.room(tenant, whole=whole):
            return False
        self.used += count
        self._taken[tenant] = self.of(tenant) + count
        return True

    def give_back(self, tenant: Tenant, count: int = 1) -> None:
        """Give back what was taken."""
        self.used -= count
        self._taken[tenant] -= count
        if not self._taken[tenant]:
            del self._taken[tenant]
