"""Whose the connections of TCP are.

A connection counts for its address until it has shown a valid token, and from then on for that
token's tenant.  Strangers from one address can have only some of all connections, and a tenant only
its share, so neither locks the others out.

A client opens many connections at once before it can show its token on any of them.  So an address
from which a valid token came lately may have more strangers: half of all connections.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from forkd.daemon.fair_loop import whose_is
from forkd.daemon.logins import network_of
from forkd.model.shares import Shares

if TYPE_CHECKING:
    from forkd.model.caller import Caller, Tenant


KNOWN_S = 300.0
"""How long after a valid token an address may have more strangers."""

KNOWN_MAX = 4_096
"""Most such addresses; the one whose last token came longest ago is forgotten first."""


class Visitors:
    """The connections of one address that the daemon listens on.

    Args:
        connections_max: How many there may be.
        strangers_max: How many of them one address may have without a valid token.
    """

    def __init__(self, connections_max: int, strangers_max: int) -> None:
        self._strangers_max = strangers_max
        self._strangers: Counter[str] = Counter()
        self._shares = Shares(connections_max)
        self._known: OrderedDict[str, float] = OrderedDict()

    def enter(self, address: str) -> Visitor | None:
        """Return a new connection from an address; None if the address has too many."""
        network = network_of(address)
        if self._strangers[network] >= self._most(network):
            return None
        self._strangers[network] += 1
        return Visitor(self, network)

    def note_known(self, network: str) -> None:
        """Note that a valid token came from an address."""
        self._known[network] = time.monotonic()
        self._known.move_to_end(network)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def _most(self, network: str) -> int:
        known_s = self._known.get(network)
        if known_s is None or time.monotonic() - known_s > KNOWN_S:
            return self._strangers_max
        return max(self._strangers_max, self._shares.most // 2)

    def forget(self, network: str) -> None:
        """Count one stranger less of an address."""
        self._strangers[network] -= 1
        if not self._strangers[network]:
            del self._strangers[network]

    def admit(self, caller: Caller) -> bool:
        """Count one connection more for a caller's tenant, if it may have it."""
        return self._shares.take(caller.tenant, whole=caller.is_admin)

    def dismiss(self, tenant: Tenant) -> None:
        """Count one connection less for a tenant."""
        self._shares.give_back(tenant)


class Visitor:
    """One connection: a stranger's, until it has shown a valid token.

    Attributes:
        whose: Whose it is to the event loop; see `forkd.daemon.fair_loop`.
    """

    def __init__(self, visitors: Visitors, network: str) -> None:
        self._visitors = visitors
        self._network = network
        self._is_stranger = True
        self._tenant: Tenant | None = None
        self.whose = ""

    def show(self, caller: Caller) -> bool:
        """Note that a valid token was shown; return whether the tenant may have the connection."""
        self._visitors.note_known(self._network)
        if caller.tenant == self._tenant:
            return True
        if not self._visitors.admit(caller):
            return False
        self.leave()
        self._tenant = caller.tenant
        self.whose = whose_is(caller)
        return True

    def leave(self) -> None:
        """Count for nobody any more; idempotent."""
        if self._is_stranger:
            self._visitors.forget(self._network)
            self._is_stranger = False
        if self._tenant is not None:
            self._visitors.dismiss(self._tenant)
            self._tenant = None
