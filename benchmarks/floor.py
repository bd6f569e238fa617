"""The physical floor: `forkd-floor`, run as often and as wide as what stands beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.harness import Json, median
from forkd.errors import EngineError
from forkd.host import process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

RUN_TIMEOUT_S = 600.0
"""How long one run may take: a thousand children take 15 s where KVM is emulated."""


@dataclass(slots=True)
class Floor:
    """Floor rounds of one width, collected over the run.

    Attributes:
        program: `forkd-floor`.
        n: Children of one round.
        walls_ms: One for each measured round; the cold ones are not here.
        children_ms: The median child of each run.
    """

    program: Path
    n: int
    walls_ms: list[float] = field(default_factory=list)
    children_ms: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)

    async def round(self, repeat: int = 1) -> None:
        """Run `repeat` measured rounds, after a cold one.

        Raises:
            HostError: The floor program failed.
        """
        args: list[str | Path] = [self.program, "--n", str(self.n), "--repeat", str(repeat)]
        finished = await asyncio.to_thread(process.run, args, timeout_s=RUN_TIMEOUT_S)
        said = json.loads(finished.stdout)
        self.walls_ms += said["wall_ms"]
        self.children_ms.append(said["child_ms_p50"])
        self.stages.append(said["stages_ms"])

    @property
    def wall_ms(self) -> float:
        """The median round."""
        return median(self.walls_ms)

    def figures(self) -> Json:
        """Return what is kept of it."""
        return {
            "n": self.n,
            "rounds": len(self.walls_ms),
            "wall_ms": self.wall_ms,
            "ms_per_child": self.wall_ms / self.n,
            "child_p50_ms": median(self.children_ms),
            "stages_ms": {
                name: median(stages[name] for stages in self.stages) for name in self.stages[0]
            },
        }


@dataclass(slots=True)
class Probe:
    """A bare machine that writes to `dirty_mib` of its memory without end, to be branched."""

    process: asyncio.subprocess.Process
    pauses_ms: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)

    async def round(self) -> None:
        """Branch it once; it is paused before and after.

        Raises:
            EngineError: The floor program failed.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise EngineError("the probe has no pipes")
        stdin.write(b"\n")
        async with asyncio.timeout(RUN_TIMEOUT_S):
            line = await stdout.readline()
        if not line:
            raise EngineError("the probe ended; what it said is above")
        said = json.loads(line)
        self.pauses_ms.append(said["pause_ms"])
        self.stages.append(said["stages_ms"])


@contextlib.asynccontextmanager
async def probe(program: Path, dirty_mib: int) -> AsyncIterator[Probe]:
    """Start a probe; it is gone after the block."""
    pipe = asyncio.subprocess.PIPE
    running = await asyncio.create_subprocess_exec(
        program, "branch", "--dirty-mib", str(dirty_mib), stdin=pipe, stdout=pipe
    )
    try:
        yield Probe(running)
    finally:
        running.kill()
        await running.wait()
