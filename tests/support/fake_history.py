"""What a fake service tells of its sandboxes: events and usage."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.model.caller import Scope
from forkd.model.event import Event, EventBatch, EventKind
from forkd.model.usage import Traffic, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from forkd.model.caller import Caller
    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from tests.support.fake_service import FakeService

THEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MIB = 1 << 20


@dataclass
class Component:
    """One component of the host; all share its world."""

    world: FakeService


@dataclass
class FakeUsages(Component):
    """Each sandbox has more than the one before; each time one asks, all have had more CPU time."""

    used_s: float = 0.0
    now: datetime = THEN

    async def list(self, caller: Caller) -> tuple[Usage, ...]:
        self.used_s += 0.01
        self.now = datetime.now(UTC)
        every = enumerate(self.world.running.values(), start=1)
        return tuple(self._of(each.sandbox, number) for number, each in every)

    async def get(self, caller: Caller, sandbox: SandboxId) -> Usage:
        return self._of(self.world.guest(caller, sandbox).sandbox, 1)

    def _of(self, sandbox: Sandbox, number: int) -> Usage:
        traffic = Traffic(number * 1_000, number * 2_000) if sandbox.address else None
        cpu_s, exact = number * self.used_s, number % 2 == 1
        return Usage(sandbox, self.now, cpu_s, number * MIB, exact, number * 4096, traffic, None)


@dataclass
class FakeJournal(Component):
    """Ends each stream after its first batch, as a daemon does that is started again and again."""

    happened: list[Event] = field(default_factory=list)

    def happen(self, *subjects: str) -> None:
        """Have sandboxes become ready."""
        for each in subjects:
            kind, id_ = EventKind.SANDBOX_READY, len(self.happened) + 1
            self.happened.append(Event(id_, THEN, kind, each, detail={"tag": "warm"}))

    async def follow(
        self, caller: Caller, after: int | None = None, *, follow: bool = True
    ) -> AsyncGenerator[EventBatch, None]:
        caller.require(Scope.READ)
        seen = len(self.happened) if after is None else after
        yield EventBatch(tuple(self.happened[seen:]), max(seen, len(self.happened)))
