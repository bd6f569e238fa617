"""Kill the processes that forkd starts, or is told of; they are found by running it.

    with Processes() as processes:
        await work()
    processes.found         # in the order in which forkd came to know them

A process is known from when `subprocess` starts it, or `os.pidfd_open` takes hold of it: what a
zygote forks, forkd knows by its number alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from forkd.errors import CapacityError, Denied, Forbidden, ForkdError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fault_world import World
    from tests.support.faults import Injector, Site

DEATH_S = 10.0
"""How long the kernel may take to end a process that was killed."""

take = os.pidfd_open
"""What takes hold of a process, also while that is noted."""


def kill(pid: int) -> None:
    """Kill a process, and return when it has ended; one that has is fine."""
    try:
        pidfd = take(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(DEATH_S * 1e3), f"process {pid} survives SIGKILL"
    finally:
        os.close(pidfd)


@dataclass
class Processes:
    """Notes the processes that forkd comes to know within the block.

    Attributes:
        found: Each process, with how many sites had been reached when it was known.
        doomed: Which of them is killed as soon as it is known, counted from 0; None for none.
        sites: What is being recorded, for `found`.
    """

    doomed: int | None = None
    sites: dict[Site, None] = field(default_factory=dict)
    found: dict[int, int] = field(default_factory=dict)
    _patched: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Self:
        start = getattr(subprocess, "_fork_exec")  # noqa: B009 - it has no type

        def started(*args: object) -> int:
            pid: int = start(*args)
            self._note(pid)
            return pid

        def taken(pid: int, flags: int = 0) -> int:
            self._note(pid)
            return take(pid, flags)

        for owner, name, new in ((subprocess, "_fork_exec", started), (os, "pidfd_open", taken)):
            self._patched.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        return self

    def __exit__(self, *_: object) -> None:
        self._patched.close()

    def _note(self, pid: int) -> None:
        if pid in self.found:
            return
        self.found[pid] = len(self.sites)
        if len(self.found) - 1 == self.doomed:
            kill(pid)


Victim = int | str
"""Which process: the number of one that the step brings, `source`, `zygote`, or `given`."""


@dataclass(frozen=True, slots=True)
class Death:
    """A process that is killed in a step.

    Attributes:
        step: The step.
        victim: The process.
        site: Before which call; None for as soon as it is known.
    """

    step: str
    victim: Victim
    site: Site | None

    def __str__(self) -> str:
        when = "at once" if self.site is None else f"before {self.site}"
        return f"process {self.victim!r} killed {when}, in {self.step!r}"

    @contextlib.contextmanager
    def going_wrong(self, injector: Injector, world: World) -> Iterator[None]:
        """Have it killed within the block."""
        doomed = self.victim if self.site is None and isinstance(self.victim, int) else None
        there = present(self.victim, world)
        with Processes(doomed) as processes:
            if self.site is None:
                yield
                injector.fired = doomed is not None and len(processes.found) > doomed
            else:
                with injector.happening(self.site, lambda: self._strike(processes, there)):
                    yield

    def _strike(self, processes: Processes, there: list[int]) -> None:
        known = list(processes.found)
        brought = known[self.victim :][:1] if isinstance(self.victim, int) else []
        for pid in (*there, *brought):
            kill(pid)

    def judge(self, outcome: ForkdError | str | None) -> str | None:
        """Return what is wrong with how the request has ended; None if nothing is."""
        if not isinstance(outcome, ForkdError):
            return outcome
        untrue = (CapacityError, InvalidRequest, Denied, Forbidden)
        return (
            f"it ended with the wrong error, {outcome!r}" if isinstance(outcome, untrue) else None
        )


def present(victim: Victim, world: World) -> list[int]:
    """Return the processes that are meant, of those that there are before a step."""
    match victim:
        case "source":
            return [world.source_pid]
        case "zygote":
            return [zygote.process.pid for zygote in world.zygotes()]
        case "given":
            return [pid for pid in world.machines() if pid != world.source_pid]
        case _:
            return []


def deaths_of(step: str, sites: dict[Site, None], found: dict[int, int]) -> list[Death]:
    """Return each process of a step, killed as soon as it is known and before each later call."""
    every = list(sites)
    deaths = []
    for number, begin in enumerate(found.values()):
        deaths += [Death(step, number, None)]
        deaths += [Death(step, number, site) for site in every[begin:]]
    for victim in ("source", "zygote", "given"):
        deaths += [Death(step, victim, site) for site in every]
    return deaths
