"""What hogs cost the quiet: guests that take all they can, beside guests that are asked something.

Ten sandboxes are asked in turn, first alone, then beside one hog of each kind.  All are forked by
the service, each in its cgroup, so that what is measured are the limits that a user gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness import Json, Stopwatch, summary
from benchmarks.questions import CODE, EVAL_TIMEOUT_S
from forkd.errors import EngineError
from forkd.model.caller import local_caller
from forkd.model.exec import ExecRequest, Stdout
from forkd.model.sandbox import ForkOptions
from forkd.service.host import open_host

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from benchmarks.teller import Teller
    from forkd.model.ids import SandboxId, Tag
    from forkd.model.sandbox import Sandbox
    from forkd.service.host import Host
    from forkd.service.settings import HostSettings

QUIET = 10
"""How many sandboxes are asked."""

FORK_DEADLINE_S = 600.0
"""How long one child may take where the processor is emulated."""

HOG_END_S = 300.0
"""How long a hog that its limit ends may take to get there."""

HOG_LOOK_S = 0.5

CALLER = local_caller()

MEMORY_LIMIT_MIB = 256
"""Of the hog that takes memory: half of what its guest has."""

DISK_LIMIT_MIB = 64
"""Of the hogs that write."""


@dataclass(frozen=True, slots=True)
class Hog:
    """A guest that takes all it can of one thing.

    Attributes:
        command: What it runs, until it is ended.
        options: Its limits, those that the others do not have.
        ends: Whether its limit ends it.
    """

    command: str
    options: ForkOptions
    ends: bool = False


HOGS = {
    "processes": Hog("while :; do sleep 600 & done", ForkOptions(deadline_s=FORK_DEADLINE_S)),
    "memory": Hog(
        "python3 -c 'held = []\nwhile True: held.append(bytearray(b\"x\") * (1 << 20))'",
        ForkOptions(memory_limit_mib=MEMORY_LIMIT_MIB, deadline_s=FORK_DEADLINE_S),
        ends=True,
    ),
    "disk": Hog(
        "while :; do head -c 1M /dev/urandom >> /root/filled; done",
        ForkOptions(disk_limit_mib=DISK_LIMIT_MIB, deadline_s=FORK_DEADLINE_S),
    ),
    "io": Hog(
        "while :; do dd if=/dev/zero of=/root/written bs=64k count=64 oflag=dsync; done",
        ForkOptions(disk_limit_mib=DISK_LIMIT_MIB, deadline_s=FORK_DEADLINE_S),
    ),
    "cpu": Hog("while :; do :; done", ForkOptions(deadline_s=FORK_DEADLINE_S)),
}
"""One of each kind; their commands print nothing that anybody reads."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How often each quiet sandbox is asked, alone and beside the hogs."""

    asked: int
    steps: int = 3


FULL = Plan(asked=60)
QUICK = Plan(asked=10)


async def measure(settings: HostSettings, tag: Tag, teller: Teller, *, quick: bool) -> Json:
    """Ask the quiet ones alone, then beside all hogs; return both, and what became of the hogs.

    Raises:
        ForkdError: A quiet sandbox did not answer, or a hog ended that should not have, or the
            other way round.
    """
    plan = QUICK if quick else FULL
    async with open_host(settings) as host:
        teller.begin("fork of the quiet ones")
        async with forked(host, tag, ForkOptions(deadline_s=FORK_DEADLINE_S), QUIET) as quiet:
            await asked(host, quiet, 2)  # uncounted: first questions touch pages
            teller.begin("quiet ones, alone")
            alone_ms = await asked(host, quiet, plan.asked)
            async with contextlib.AsyncExitStack() as stack:
                hogs = {
                    name: await stack.enter_async_context(hogging(host, tag, hog))
                    for name, hog in HOGS.items()
                }
                teller.begin("quiet ones, beside the hogs")
                beside_ms = await asked(host, quiet, plan.asked)
                ended = {
                    name: await why_ended(host, id_, ends=HOGS[name].ends)
                    for name, id_ in hogs.items()
                }
    for name, hog in HOGS.items():
        if hog.ends != (ended[name] is not None):
            raise EngineError(f"the hog of {name}: {ended[name] or 'has not ended'}")
    return lay_out(alone_ms, beside_ms, ended)


def lay_out(alone_ms: list[float], beside_ms: list[float], ended: dict[str, str | None]) -> Json:
    """Return what is kept of it; `ended` says of each hog why it has, if it has."""
    alone, beside = summary(alone_ms), summary(beside_ms)
    return {
        "quiet": QUIET,
        "asked": len(alone_ms),
        "alone": alone,
        "beside": beside,
        "p99_ratio": beside["p99_ms"] / alone["p99_ms"],
        "p50_ratio": beside["p50_ms"] / alone["p50_ms"],
        "ended": ended,
    }


@contextlib.asynccontextmanager
async def forked(
    host: Host, tag: Tag, options: ForkOptions, count: int
) -> AsyncGenerator[tuple[Sandbox, ...], None]:
    """Have sandboxes within the block.

    Raises:
        EngineError: One did not become ready.
    """
    result = await host.sandboxes.fork(CALLER, tag, count, options)
    try:
        if result.failures:
            raise EngineError(f"a child failed: {result.failures[0].message}")
        yield result.sandboxes
    finally:
        await host.sandboxes.delete_all(each.id for each in result.sandboxes)


@contextlib.asynccontextmanager
async def hogging(host: Host, tag: Tag, hog: Hog) -> AsyncGenerator[SandboxId, None]:
    """Have a hog within the block, which is at work when it begins."""
    command = f"echo begun; exec >/dev/null 2>&1; {hog.command}"
    async with forked(host, tag, hog.options, 1) as (sandbox,):
        request = ExecRequest(("sh", "-c", command))
        async with await host.guests.exec(CALLER, sandbox.id, request) as running:
            async for event in running:
                if isinstance(event, Stdout):
                    break
            yield sandbox.id


async def asked(host: Host, quiet: tuple[Sandbox, ...], times: int) -> list[float]:
    """Ask each quiet sandbox so often, in turn; return how long each answer took.

    Raises:
        EngineError: An answer was wrong.
    """
    taken_ms = []
    for _ in range(times):
        for each in quiet:
            clock = Stopwatch()
            result = await host.guests.eval(CALLER, each.id, CODE, timeout_s=EVAL_TIMEOUT_S)
            taken_ms.append(clock.ms())
            if result.value != [0.0] * 5:
                raise EngineError(f"a quiet sandbox answered {result.repr!r}")
    return taken_ms


async def why_ended(host: Host, sandbox: SandboxId, *, ends: bool) -> str | None:
    """Return why a hog has ended; None if it has not, for which one that `ends` is given time."""
    deadline_s = time.monotonic() + (HOG_END_S if ends else 0.0)
    while True:
        reason = (await host.sandboxes.get(CALLER, sandbox)).exit_reason
        if reason is not None or time.monotonic() >= deadline_s:
            return reason
        await asyncio.sleep(HOG_LOOK_S)
