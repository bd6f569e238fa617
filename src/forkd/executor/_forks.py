"""The sandboxes of one executor: branches of one that is prepared, made as they are needed.

Threads that want a sandbox at the same time get theirs by one branch: the first of them asks for as
many as wait.  A sandbox lives `ttl_s` beyond the last sign of life of the program, which a thread
gives.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from forkd.errors import (
    BudgetError,
    CapacityError,
    Conflict,
    EngineExited,
    ForkdError,
    NotFound,
    QuotaExceeded,
    SandboxLost,
)
from forkd.sdk._parallel import sync_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.sdk import Sandbox

SIGNS_PER_TTL = 3
"""How often in `ttl_s` the daemon is told that the program lives."""

REQUESTS_AT_ONCE_MAX = 16
"""Sandboxes that are ended, or given more time, at the same time, when all are."""

FULL = (CapacityError, QuotaExceeded, BudgetError)
"""What says that there is no room for more sandboxes."""

GONE = (NotFound, Conflict, EngineExited)
"""What says that a sandbox does not run, so that nothing was started in it."""


class Forks:
    """The sandboxes of an executor.

    Args:
        make: Makes the sandbox of which the others are branches.
        prepare: Gets it ready, however long that takes: it is given more time meanwhile.
        most: How many there may be at once, beside that one.
        ttl_s: How long each lives after the program has gone.
        deadline_s: How long each has until its agent answers.

    Raises:
        Exception: What `make` and `prepare` raise.
    """

    def __init__(
        self,
        make: Callable[[], Sandbox],
        prepare: Callable[[Sandbox], object],
        most: int,
        ttl_s: float,
        deadline_s: float | None = None,
    ) -> None:
        self._make = make
        self._prepare = prepare
        self._most = most
        self._ttl_s = ttl_s
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._idle: list[Sandbox] = []
        self._live: dict[str, Sandbox] = {}
        self._waiting = 0
        self._growing = False
        self._closed = threading.Event()
        self._source = make()
        keeper = threading.Thread(target=self._keep, name="forkd-executor", daemon=True)
        keeper.start()
        try:
            prepare(self._source)
        except BaseException:
            self.close()
            raise

    @property
    def ids(self) -> list[str]:
        """The sandboxes that are there, but for the one that was prepared."""
        with self._changed:
            return list(self._live)

    def take(self) -> Sandbox:
        """Return a sandbox for one thread alone; waits for one if there may be no more.

        Raises:
            SandboxLost: All of them were ended meanwhile.
            ForkdError: There is none, and none can be made.
        """
        with self._changed:
            while True:
                if self._closed.is_set():
                    raise SandboxLost("the executor was shut down")
                if self._idle:
                    return self._idle.pop()
                if not self._growing and len(self._live) < self._most:
                    break
                self._waiting += 1
                try:
                    self._changed.wait()
                finally:
                    self._waiting -= 1
            self._growing = True
            wanted = min(self._waiting + 1, self._most - len(self._live))
        made: list[Sandbox] = []
        try:
            made = self._made(wanted)
        finally:
            with self._changed:
                self._growing = False
                self._live.update((each.id, each) for each in made)
                self._idle += made
                self._changed.notify_all()
        if self._closed.is_set():
            _end_all(made)
        return self.take()

    def give_back(self, sandbox: Sandbox) -> None:
        """Let others use a sandbox."""
        with self._changed:
            self._idle.append(sandbox)
            self._changed.notify()

    def end(self, sandbox: Sandbox) -> None:
        """End a sandbox, which may have ended already."""
        with contextlib.suppress(ForkdError):  # its time to live ends it
            sandbox.kill()
        with self._changed:
            self._live.pop(sandbox.id, None)
            self._changed.notify()

    def close(self) -> None:
        """End all sandboxes; idempotent."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
            every = [*self._live.values(), self._source]
            self._live.clear()
            self._idle.clear()
        _end_all(every)

    def _made(self, wanted: int) -> list[Sandbox]:
        """Return new sandboxes: `wanted`, fewer if the host is full, none if others will do."""
        while True:
            try:
                return self._branched(wanted)
            except FULL:
                if wanted > 1:
                    wanted //= 2
                    continue
                with self._changed:
                    if not self._live:
                        raise
                    self._most = len(self._live)
                return []

    def _branched(self, wanted: int) -> list[Sandbox]:
        try:
            return self._branch(wanted)
        except FULL:
            raise
        except GONE:
            source = self._make()
            with self._changed:
                self._source = source
            try:
                self._prepare(source)
            except BaseException:
                _end_all([source])
                raise
        return self._branch(wanted)

    def _branch(self, wanted: int) -> list[Sandbox]:
        return list(self._source.branch(wanted, ttl_s=self._ttl_s, deadline_s=self._deadline_s))

    def _keep(self) -> None:
        """Say that the program lives, until all is ended."""
        while not self._closed.wait(self._ttl_s / SIGNS_PER_TTL):
            with self._changed:
                every = [self._source, *self._live.values()]
            # One after the other, they would take longer than they live, if the daemon is busy.
            _each(every, lambda sandbox: sandbox.set_ttl(self._ttl_s))


def _end_all(sandboxes: list[Sandbox]) -> None:
    _each(sandboxes, lambda sandbox: sandbox.kill())


def _each(sandboxes: list[Sandbox], ask: Callable[[Sandbox], object]) -> None:
    """Ask something of each sandbox, several at a time, whatever becomes of it."""

    def asked(sandbox: Sandbox) -> None:
        with contextlib.suppress(ForkdError):
            ask(sandbox)

    try:
        sync_map(asked, sandboxes, REQUESTS_AT_ONCE_MAX)
    except RuntimeError:  # the program ends, and can have no more threads
        for each in sandboxes:
            asked(each)
