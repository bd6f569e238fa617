"""What other clients of a daemon cost a fork: the part `clients`.

    python -m benchmarks.clients [--quick]

measures here, over the fake VMM of the tests, without any KVM: what its machines do costs little,
so the daemon's own share of a fork, and with it what clients can take, is larger than over a real
one.  `make bench ARGS='--only clients'` measures over real machines.

A fork is timed as its client has it: from the request over a kept connection to the daemon's Unix
socket until the answer that its one sandbox is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import bed, over_fake
from benchmarks.harness import Json, Stopwatch, median, summary
from forkd.errors import EngineError
from forkd.host import proc
from tests.support.raw_http import Answer, RawClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from benchmarks.teller import Teller
    from forkd.model.ids import Tag
    from forkd.service.settings import HostSettings

ROOT = Path(__file__).resolve().parent.parent

VISITORS = 200
"""Slow, silent and vanishing clients, of each manner as many (`tests/support/crowd.py`)."""

PACE_FORKS = 100
"""In the time of so many forks each of them once says a byte, comes or goes.

So a slow machine has slow clients too: those of a real one would keep an emulated one busy.
"""

PACE_MAX_S = 8.0
"""Slower they are not: who says nothing is cut off after ten seconds."""

REQUESTS = 500
"""Requests at once, each over a connection of its own: what a sandbox is."""

ANSWER_TIMEOUT_S = 300.0
"""How long one answer may take: five hundred share an emulated processor."""

END_TIMEOUT_S = 60.0

WARMUP = 10
"""Forks by which the pace is set."""

PACES = 5
"""For how many of their paces the 200 are looked at while nobody forks."""

ALONE, BESIDE, AMONG, AFTER = "alone", "beside", "among", "after"
"""Forks with no other there, beside the 200, among the 500, and when these were answered."""

REQUEST = "{method} {path} HTTP/1.1\r\nHost: forkd\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class Plan:
    """How often what is measured.

    Attributes:
        rounds: In each of which everything takes its turn.
        turns: How often in a round the 200 come and go.
        forks: How many forks in a row.
    """

    rounds: int
    turns: int
    forks: int


FULL = Plan(rounds=10, turns=10, forks=3)
QUICK = Plan(rounds=3, turns=4, forks=3)


@dataclass(slots=True)
class Samples:
    """What was measured.

    Attributes:
        forks_ms: Latencies of forks, by kind and round.
        cpu_ms: What the daemon's event loop ran for each fork and end, by kind and turn.
        answered_ms: From 500 requests until the last answer.
        visitors_cpu: Which part of a processor the 200 take of the daemon when nobody forks.
    """

    forks_ms: dict[str, list[list[float]]] = field(
        default_factory=lambda: {kind: [] for kind in (ALONE, BESIDE, AMONG, AFTER)}
    )
    cpu_ms: dict[str, list[float]] = field(
        default_factory=lambda: {kind: [] for kind in (ALONE, BESIDE, AFTER)}
    )
    answered_ms: list[float] = field(default_factory=list)
    visitors_cpu: float = 0.0

    def figures(self) -> Json:
        """Return what is kept of it."""
        every = {kind: [*itertools.chain.from_iterable(of)] for kind, of in self.forks_ms.items()}
        base = median(every[ALONE])
        return {
            "visitors": VISITORS,
            "requests": REQUESTS,
            "visitors_cpu": self.visitors_cpu,
            "requests_answered_ms": median(self.answered_ms),
            **{kind: summary(every[kind]) for kind in every},
            **{f"{kind}_ratio": median(every[kind]) / base for kind in (BESIDE, AMONG, AFTER)},
            **{f"{kind}_cpu_ms": median(self.cpu_ms[kind]) for kind in self.cpu_ms},
            **{
                f"{kind}_cpu_ratio": median(self.cpu_ms[kind]) / median(self.cpu_ms[ALONE])
                for kind in (BESIDE, AFTER)
            },
            **{f"{kind}_ratio_by_round": self._by_round(kind) for kind in (BESIDE, AFTER)},
        }

    def _by_round(self, kind: str) -> list[float]:
        """Return each round's ratio of medians, sorted: how much they differ is the noise."""
        pairs = zip(self.forks_ms[kind], self.forks_ms[ALONE], strict=True)
        return sorted(median(some) / median(alone) for some, alone in pairs)


class Daemon:
    """A connection to a daemon, which does one thing after the other."""

    def __init__(self, pid: int, socket: Path, client: RawClient, tag: Tag) -> None:
        self.pid = pid
        self.socket = socket
        self._client = client
        self._tag = tag

    async def fork_ms(self) -> float:
        """Fork a sandbox, and end it; return how long the fork took."""
        clock = Stopwatch()
        (made,) = (await self._ask("POST", "/v2/sandboxes", {"snapshot_tag": self._tag})).json()
        taken_ms = clock.ms()
        await self._ask("DELETE", f"/v2/sandboxes/{made['id']}")
        return taken_ms

    async def forks(self, count: int, latencies_ms: list[float], cpu_ms: list[float]) -> None:
        """Fork and end so many, one after the other, and note what that took.

        One before, which does not count, waits for whatever else the daemon has to do.

        Args:
            count: How many.
            latencies_ms: Gets how long each fork took.
            cpu_ms: Gets how long the daemon's event loop ran, for each fork and end.
        """
        await self.fork_ms()
        before_ns = ran_ns(self.pid)
        latencies_ms += [await self.fork_ms() for _ in range(count)]
        cpu_ms.append((ran_ns(self.pid) - before_ns) / 1e6 / count)

    async def _ask(self, method: str, path: str, body: Json | None = None) -> Answer:
        self._client.say(request(method, path, body))
        return checked(await self._client.answer(ANSWER_TIMEOUT_S))


def request(method: str, path: str, body: Json | None = None) -> bytes:
    """Return the bytes of a request."""
    data = b"" if body is None else json.dumps(body).encode()
    head = REQUEST.format(method=method, path=path) + f"Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def checked(answer: Answer) -> Answer:
    """Return an answer that is one.

    Raises:
        EngineError: The daemon refused.
    """
    if answer.status >= 400:  # noqa: PLR2004 - HTTP's errors
        raise EngineError(f"the daemon answered {answer.status}: {answer.body.decode()}")
    return answer


class Crowd:
    """The slow, silent and vanishing, in a process of their own."""

    def __init__(self, say: asyncio.StreamWriter, hear: asyncio.StreamReader) -> None:
        self._say = say
        self._hear = hear

    @contextlib.asynccontextmanager
    async def there(self) -> AsyncIterator[None]:
        """Have them all there within the block."""
        await self._tell("here")
        yield
        await self._tell("gone")

    async def _tell(self, wanted: str) -> None:
        self._say.write(b"\n")
        said = (await self._hear.readline()).decode().strip()
        if said != wanted:
            raise EngineError(f"the crowd is not {wanted}, it ended; what it said is above")


@contextlib.asynccontextmanager
async def crowd_of(socket: Path, pace_s: float) -> AsyncIterator[Crowd]:
    """Start a crowd, which is not there yet; its process is gone after the block.

    Raises:
        EngineError: It has no pipes.
    """
    words = ("-m", "tests.support.crowd", str(socket), str(VISITORS), str(pace_s))
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=ROOT, stdin=pipe, stdout=pipe
    )
    try:
        if process.stdin is None or process.stdout is None:
            raise EngineError("the crowd has no pipes")
        yield Crowd(process.stdin, process.stdout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def rush(daemon: Daemon) -> tuple[float, float]:
    """Fork among so many requests at once; return how long that took, and all answers.

    Raises:
        EngineError: The daemon refused one.
    """
    said, half_said = itertools.count(1), asyncio.Event()

    async def one() -> None:
        async with RawClient(f"unix://{daemon.socket}") as client:
            client.say(request("GET", "/v2/sandboxes"))
            if next(said) == REQUESTS // 2:
                half_said.set()
            checked(await client.answer(ANSWER_TIMEOUT_S))

    clock = Stopwatch()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(REQUESTS):
                group.create_task(one())
            await half_said.wait()
            fork_ms = await daemon.fork_ms()
    except BaseExceptionGroup as errors:
        raise bed.first_of(errors) from errors
    return fork_ms, clock.ms()


async def round_of(daemon: Daemon, crowd: Crowd, plan: Plan, to: Samples) -> None:
    """Measure everything once; forks alone and beside others in short turns."""
    alone: list[float] = []
    beside: list[float] = []
    after: list[float] = []
    for _ in range(plan.turns):
        await daemon.forks(plan.forks, alone, to.cpu_ms[ALONE])
        async with crowd.there():
            await daemon.forks(plan.forks, beside, to.cpu_ms[BESIDE])
    fork_ms, answered_ms = await rush(daemon)
    await daemon.forks(plan.forks * plan.turns, after, to.cpu_ms[AFTER])
    for kind, taken in ((ALONE, alone), (BESIDE, beside), (AMONG, [fork_ms]), (AFTER, after)):
        to.forks_ms[kind].append(taken)
    to.answered_ms.append(answered_ms)


async def cpu_of(daemon: Daemon, crowd: Crowd, pace_s: float) -> float:
    """Return which part of a processor a daemon spends on a crowd while nobody forks."""
    async with crowd.there():
        clock, before_ns = Stopwatch(), ran_ns(daemon.pid)
        await asyncio.sleep(PACES * pace_s)
        return (ran_ns(daemon.pid) - before_ns) / 1e6 / clock.ms()


def ran_ns(pid: int) -> int:
    """Return for how long a process' first thread has run, the daemon's event loop."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


async def measure(host: HostSettings, tag: Tag, teller: Teller, *, quick: bool) -> Json:
    """Serve a host on which there is a snapshot, measure, and return the figures.

    Raises:
        EngineError: The daemon did not start, or refused something.
    """
    plan, samples = QUICK if quick else FULL, Samples()
    proc.raise_open_files_limit()
    with served(host) as (pid, socket, _):
        async with RawClient(f"unix://{socket}") as client:
            daemon = Daemon(pid, socket, client, tag)
            warmup_ms: list[float] = []
            await daemon.forks(WARMUP, warmup_ms, [])
            pace_s = min(PACE_FORKS * median(warmup_ms) / 1e3, PACE_MAX_S)
            async with crowd_of(socket, pace_s) as crowd:
                await rush(daemon)
                for number in range(plan.rounds):
                    teller.begin(f"forks beside clients, round {number + 1} of {plan.rounds}")
                    await round_of(daemon, crowd, plan, samples)
                samples.visitors_cpu = await cpu_of(daemon, crowd, pace_s)
    return {"pace_s": pace_s, "rounds": plan.rounds, **samples.figures()}


@contextlib.contextmanager
def served(host: HostSettings) -> Iterator[tuple[int, Path, str]]:
    """Run the daemon on a host's folders; give its process, its socket and its URL of TCP.

    Raises:
        EngineError: It does not start.
    """
    with tempfile.TemporaryDirectory(prefix="fkc-", dir="/tmp") as run_dir:
        socket, log = Path(run_dir, "forkd.sock"), Path(run_dir, "log")
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "FORKD_SOCKET": str(socket),
            "FORKD_BIND": "127.0.0.1:0",
            "FORKD_STATE_DIR": str(host.state_dir),
            "FORKD_RUN_DIR": run_dir,
            "FORKD_CACHE_DIR": str(host.cache_dir),
            "FORKD_RECIPE_DIRS": ":".join(map(str, host.recipe_dirs)),
            "FORKD_VMM": str(host.vmm),
            "FORKD_AGENT": str(host.agent),
            "FORKD_CGROUPS": "on" if host.cgroups else "off",
            "FORKD_JAIL": "off" if host.uids is None else "on",
        }
        program = Path(sys.executable).parent / "forkd-daemon"
        command = [str(program), "serve", "--log", str(log)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as daemon:  # noqa: S603 - ours
            try:
                said = json.loads(next(iter(daemon.stdout or ()), b"{}"))
                if said.get("event") != "listening":
                    raise EngineError(f"the daemon does not start: {said}")
                yield daemon.pid, socket, said["urls"][1]
            finally:
                daemon.terminate()
                daemon.wait(END_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(over_fake.main("clients", __doc__, measure, (FULL.rounds, QUICK.rounds)))
