"""Do one step with one thing gone wrong, and say what is not as it must be afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from forkd.errors import CapacityError, ForkdError, RequestError
from forkd.host.faults import EXHAUSTED
from forkd.model.sandbox import ForkOptions
from forkd.network.plan import Plan
from forkd.service import journal
from forkd.service.sandboxes import owner
from forkd.service.settings import PackPolicy
from forkd.service.snapshots import bake
from forkd.service.trees import promotion
from tests.support.fault_answers import Readings
from tests.support.fault_processes import Processes
from tests.support.fault_steps import STEPS
from tests.support.fault_table import AFTERWARDS, ERRORS
from tests.support.fault_world import World, outcome_of
from tests.support.faults import Fault, Injector, Site
from tests.support.nonsense import recorded
from tests.support.service_host import make_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from tests.support.nonsense import Answer
    from tests.support.soak import Soak

TRIAL_S = 60.0
"""How long a trial may take, all looks at what it left included."""

BOOT_S = 5.0
"""How long an agent may take to announce itself."""

SOON_S = 0.01
"""What forkd does again after some seconds, it does again after so many in trials."""


class Trial(Protocol):
    """A step and what goes wrong in it."""

    @property
    def step(self) -> str:
        """Its name in `STEPS`."""
        ...

    def going_wrong(
        self, injector: Injector, world: World
    ) -> contextlib.AbstractContextManager[None]:
        """Have it go wrong within the block, and set `injector.fired` if it has."""
        ...

    def judge(self, outcome: ForkdError | str | None) -> str | None:
        """Return what is wrong with how the request has ended; None if nothing is."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """A step in which the kernel refuses a call."""

    step: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.fault}, in {self.step!r}"

    @contextlib.contextmanager
    def going_wrong(self, injector: Injector, _: World) -> Iterator[None]:
        """See `Trial`."""
        with injector.happening(self.fault.site, self.fault.happen):
            yield

    def judge(self, outcome: ForkdError | str | None) -> str | None:
        """See `Trial`."""
        if not isinstance(outcome, ForkdError) or STEPS[self.step].refused:
            return None if isinstance(outcome, ForkdError) else outcome
        if isinstance(outcome, CapacityError) == (self.fault.number in EXHAUSTED) and not (
            isinstance(outcome, RequestError)
        ):
            return None
        return f"it ended with the wrong error, {outcome!r}"


def refusals_of(step: str, sites: dict[Site, None]) -> list[Refusal]:
    """Return each call of a step with each error that it can give."""
    errors = ERRORS | AFTERWARDS
    return [Refusal(step, Fault(site, each)) for site in sites for each in errors[site.function]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What happens in a step.

    Attributes:
        sites: Where it calls the kernel, in order.
        processes: Which it starts or is told of, with how many sites it had reached by then.
        said: What machines and agents answer.
        readings: Which types read that.
    """

    sites: dict[Site, None]
    processes: dict[int, int]
    said: dict[Answer, dict[str, Any]]
    readings: Readings


@dataclass
class Laboratory:
    """Tries steps, in one world as long as that is well.

    Attributes:
        injector: Makes things go wrong.
        tried: How many trials there were.
        missed: How many of them never came to what was to go wrong: it depends on timing.
        left: How often something was left until a restart.
    """

    injector: Injector
    options: ForkOptions
    tried: int = 0
    missed: int = 0
    left: int = 0
    _world: World | None = None
    _folders: list[Path] = field(default_factory=list)

    def summary(self, every: int) -> str:
        """Say what was tried, of all that there is to try."""
        return (
            f"{self.tried} of {every} tried, {self.missed} missed, {self.left} left until a restart"
        )

    async def world(self) -> World:
        """Return a world that is well."""
        if self._world is None:
            self._world = await self._make()
        return self._world

    async def record(self, step: str) -> Recorded:
        """Do a step with nothing going wrong; return what happens in it."""
        world = await self.world()
        given = await STEPS[step].prepare(world)
        with (
            self.injector.recording() as sites,
            Processes(sites=sites) as processes,
            recorded(world.fake.folder) as said,
            Readings() as readings,
        ):
            outcome = await outcome_of(STEPS[step].act(world, given))
            await world.rest()
        await world.clean()
        await world.begin()
        problems = [*await world.untrue(), *world.left_over(), *world.leaked()]
        assert problems == [], step
        assert isinstance(outcome, ForkdError) if STEPS[step].refused else outcome is None, outcome
        return Recorded(sites, processes.found, said, readings)

    async def attempt_some(self, every: Sequence[Trial], soak: Soak, few: int) -> list[str]:
        """Attempt `few` of all trials, whichever the dice say, or all of them in a soak."""
        count = soak.count(few, len(every))
        chosen = soak.dice().sample(every, min(count, len(every)))
        return [problem for trial in chosen for problem in await self.attempt(trial)]

    async def attempt(self, trial: Trial) -> list[str]:
        """Do a step with something going wrong; return a line for each thing that is not well."""
        world = await self.world()
        self.tried += 1
        try:
            async with asyncio.timeout(TRIAL_S):
                problems = await self._attempt(world, trial)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            problems = [f"afterwards something raised {error!r}"]
        if problems:
            await self.throw_away()
        return [f"{trial}: {each}" for each in dict.fromkeys(problems)]

    async def _attempt(self, world: World, trial: Trial) -> list[str]:
        step = STEPS[trial.step]
        given = await step.prepare(world)
        with trial.going_wrong(self.injector, world):
            outcome = await outcome_of(step.act(world, given))
            await world.open()
            await world.rest()
        self.missed += not self.injector.fired
        problems = list(filter(None, [trial.judge(outcome)]))
        problems += await world.untrue()
        await world.clean()
        await world.begin()
        await world.works()
        problems += [*await world.untrue(), *world.leaked()]
        if world.left_over():
            self.left += 1
            await world.restart()
            await world.rest()
            problems += [f"left after a restart: {each}" for each in world.left_over()]
            problems += await world.untrue()
        return problems

    async def throw_away(self) -> None:
        """End the world, however it is."""
        world, self._world = self._world, None
        if world is None:
            return
        with contextlib.suppress(Exception):
            async with asyncio.timeout(TRIAL_S):
                await world.close()
        world.complaints.stop()
        for pid in world.fake.vmm_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self._folders:
            shutil.rmtree(self._folders.pop(), ignore_errors=True)

    async def _make(self) -> World:
        self._folders = [Path(tempfile.mkdtemp(prefix=name, dir="/tmp")) for name in ("ft", "fk")]
        fake = make_host(*self._folders)
        number = int.from_bytes(os.urandom(2))
        # Tests on one host may run at the same time, and each daemon has addresses of its own.
        network = Plan(IPv4Network(f"10.{100 + number % 100}.{number >> 8}.0/24"), f"f{number:04x}")
        settings = replace(fake.settings, packs=PackPolicy(allow_unsigned=True), network=network)
        world = World(replace(fake, settings=settings), self.options)
        world.complaints.start()
        await world.begin()
        await world.works()
        await world.rest()
        world.leaked()
        return world


@pytest.fixture
async def lab(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Laboratory]:
    """Steps over the fake VMM, without a network and without limits."""
    monkeypatch.setattr(promotion, "RETRY_S_MIN", SOON_S)
    monkeypatch.setattr(owner, "RETRY_S", SOON_S)
    monkeypatch.setattr(journal, "WRITE_EVERY_S", SOON_S)
    monkeypatch.setattr(journal, "WRITE_RETRY_S", SOON_S)
    monkeypatch.setattr(bake, "BOOT_TIMEOUT_S", BOOT_S)
    with Injector() as injector:
        made = Laboratory(injector, ForkOptions())
        try:
            yield made
        finally:
            await made.throw_away()
