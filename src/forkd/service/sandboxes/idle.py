"""The end of a sandbox that nobody has used for as long as that is allowed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.engine.guest import Guest
    from forkd.model.sandbox import Sandbox


class IdleWatch:
    """Calls when it is time to end a sandbox for that.

    The timer is not moved by each use: when it fires, it is set to what is left.

    Args:
        guest: Whose use counts.
        sandbox: Returns the sandbox, with how long nobody may use it.
        due: Called when it may be time; it asks `is_over` once the sandbox is its own.
    """

    def __init__(
        self, guest: Guest, sandbox: Callable[[], Sandbox], due: Callable[[], None]
    ) -> None:
        self._guest = guest
        self._sandbox = sandbox
        self._due = due
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, least_s: float = 0.0) -> None:
        """Wait for what is left of the limit, which may have changed, but at least so long."""
        self.close()
        left_s = self._left_s()
        if left_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(least_s, left_s), self._due)

    def is_over(self) -> bool:
        """Return whether nobody has used it for too long; else wait for what is left."""
        is_over = self._guest.idle_since is not None and self._left_s() == 0
        if not is_over:  # it was used meanwhile
            self.arm()
        return is_over

    def close(self) -> None:
        """Have nothing called any more; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _left_s(self) -> float | None:
        sandbox, since = self._sandbox(), self._guest.idle_since
        limit_s = sandbox.idle_ttl_s
        if limit_s is None or not sandbox.state.has_machine:
            return None
        if since is None:
            return limit_s
        return max(0.0, since + limit_s - asyncio.get_running_loop().time())
