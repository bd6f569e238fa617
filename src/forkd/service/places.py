"""So many of one kind of work at once: one more is refused, or waits.

Every kind has its places on a host, which tenants share (`forkd.model.shares`): a tenant that takes
all that it can leaves places to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkd.errors import CapacityError
from forkd.model.shares import Shares

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from forkd.model.caller import Caller


@dataclass(slots=True)
class Places:
    """The places that one kind of work has on this host.

    Attributes:
        what: What is done there, in the plural.
        most: How many places there are.
        retry_after_s: When one is likely to be free again.
    """

    what: str
    most: int
    retry_after_s: int
    _shares: Shares = field(init=False)
    _waiting: dict[asyncio.Future[None], Caller] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shares = Shares(self.most)

    @property
    def used(self) -> int:
        """How many are taken."""
        return self._shares.used

    def has_room(self, caller: Caller) -> bool:
        """Whether a caller may have one more now."""
        return self._shares.room(caller.tenant, whole=caller.is_admin) > 0

    @contextlib.contextmanager
    def take(self, caller: Caller) -> Generator[None, None, None]:
        """Have a place for the block.

        Raises:
            CapacityError: All are taken, or the tenant has its share; `context` has `asked`,
                `limit`, `used` and `retry_after_s`.
        """
        if not self._try(caller):
            raise self._refusal(caller)
        try:
            yield
        finally:
            self._give_back(caller)

    @contextlib.asynccontextmanager
    async def wait(self, caller: Caller) -> AsyncGenerator[None, None]:
        """Have a place for the block, once there is one; the first who may have it is next."""
        if not self._try(caller):
            await self._wait(caller)
        try:
            yield
        finally:
            self._give_back(caller)

    async def _wait(self, caller: Caller) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[granted] = caller
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._give_back(caller)
            raise
        finally:
            self._waiting.pop(granted, None)

    def _try(self, caller: Caller) -> bool:
        return self._shares.take(caller.tenant, whole=caller.is_admin)

    def _give_back(self, caller: Caller) -> None:
        self._shares.give_back(caller.tenant)
        for granted, waiting in self._waiting.items():
            if not granted.done() and self._try(waiting):
                granted.set_result(None)

    def _refusal(self, caller: Caller) -> CapacityError:
        if self.used >= self.most or caller.is_admin:
            return full(self.what, self.most, self.used, self.retry_after_s)
        own = self._shares.of(caller.tenant)
        return CapacityError(
            f"one more of {self.what} was asked for; tenant {caller.tenant} has {own}, its share "
            f"of the {self.most} that this host has at once: try again in {self.retry_after_s} s",
            asked=1,
            limit=self.most,
            used=own,
            retry_after_s=self.retry_after_s,
        )


def full(what: str, limit: int, used: int, retry_after_s: int) -> CapacityError:
    """Return the error of who asks for one more of something of which there are too many."""
    return CapacityError(
        f"one more of {what} was asked for; this host has at most {limit} at once, and {used} are "
        f"in use: try again in {retry_after_s} s",
        asked=1,
        limit=limit,
        used=used,
        retry_after_s=retry_after_s,
    )
