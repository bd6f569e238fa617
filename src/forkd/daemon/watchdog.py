"""Tell the service manager that the daemon's event loop turns, as sd_watchdog_enabled(3) asks."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
from typing import TYPE_CHECKING, Self

from forkd.errors import HostError
from forkd.host import proc, sockets

if TYPE_CHECKING:
    from collections.abc import Mapping

PINGS_PER_TIMEOUT = 3
"""How often it is told within the time after which it ends the daemon."""

log = logging.getLogger(__name__)


def interval_s(environment: Mapping[str, str], pid: int) -> float | None:
    """Return how often the manager wants to be told; None if it does not.

    Args:
        environment: The variables that it has given.
        pid: The process that asks.
    """
    timeout_us = environment.get("WATCHDOG_USEC", "")
    if not timeout_us.isdecimal() or int(timeout_us) == 0:
        return None
    if environment.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    return int(timeout_us) / 1_000_000 / PINGS_PER_TIMEOUT


class Watchdog:
    """Within the block, tells the manager from the event loop that the loop turns.

    A manager that is not told ends the daemon by SIGABRT, on which each thread writes where it is.
    """

    def __init__(self) -> None:
        self._interval_s = interval_s(proc.environment(), proc.own_pid())
        self._next: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        if self._interval_s is not None:
            faulthandler.enable()
            self._tell(self._interval_s)
        return self

    def __exit__(self, *_: object) -> None:
        if self._next is not None:
            self._next.cancel()

    def _tell(self, interval_s: float) -> None:
        try:
            sockets.notify_manager("WATCHDOG=1")
        except HostError as error:  # it will say so by ending us
            log.warning("the service manager was not told", extra={"error": str(error)})
        self._next = asyncio.get_running_loop().call_later(interval_s, self._tell, interval_s)
