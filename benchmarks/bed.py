"""The test bed: a baked snapshot, its zygote, and herds of children forked from it.

It drives the engine itself, without a daemon, so that the figures are of forking.  The
snapshot is baked by the service, as a daemon would; then a zygote is started on its files.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Json, Stopwatch
from forkd.engine.configs import ChildConfig, DiskConfig, ZygoteConfig
from forkd.engine.control import ChildFailed, ChildReady, Control
from forkd.engine.guest import Guest
from forkd.engine.process import VSOCK_SOCKET, ZYGOTE_SOCKET, end, start_zygote
from forkd.errors import BuildError, EngineError
from forkd.host import files
from forkd.host.spawn import Process
from forkd.model.ids import new_sandbox_id, parse_tag
from forkd.model.progress import Progress
from forkd.model.snapshot import SnapshotRequest
from forkd.service.host_service import HostService
from forkd.service.settings import HostSettings
from forkd.store.snapshots import LAYER_FILE, MEMORY_FILE, STATE_FILE, SnapshotStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    Ask = Callable[[Guest], Awaitable[object]]

    from forkd.model.sandbox import SpawnTimes
    from forkd.model.snapshot import Snapshot

TAG = parse_tag("bench")

FORK_DEADLINE_S = 600.0
"""How long one child may take: a thousand of them share two emulated processors."""

KILL_TIMEOUT_S = 120.0
"""How long the kernel may take to end a herd."""

AT_ONCE = 32
"""How many children are asked at the same time."""


@dataclass(frozen=True, slots=True)
class Programs:
    """What is measured, and with what."""

    vmm: Path
    agent: Path
    floor: Path


@dataclass(frozen=True, slots=True)
class Baked:
    """A snapshot, and how long each step of its bake took, in seconds."""

    snapshot: Snapshot
    stages_s: Json
    settings: HostSettings


@dataclass(slots=True)
class Child:
    """A child that has answered.

    Attributes:
        ready_ms: From the request to the event that said so, as its client saw them.
        asked_ms: From the request to the answer of the first question; None without one.
    """

    pid: int
    guest: Guest
    times: SpawnTimes
    ready_ms: float
    asked_ms: float | None = None


@dataclass(slots=True)
class Herd:
    """The children of one fork, all alive."""

    folder: Path
    children: list[Child] = field(default_factory=list)

    @property
    def answered_ms(self) -> float:
        """From the request until the last child had answered."""
        return max(child.ready_ms for child in self.children)

    @property
    def asked_ms(self) -> float:
        """From the request until the last child had answered its first question."""
        return max(child.asked_ms or 0.0 for child in self.children)

    async def ask_all(self, ask: Ask) -> None:
        """Ask each child, some at a time; an answer is expected of every one."""
        at_once = asyncio.Semaphore(AT_ONCE)

        async def one(child: Child) -> None:
            async with at_once:
                await ask(child.guest)
                child.guest.close()

        await asyncio.gather(*(one(child) for child in self.children))

    async def end(self) -> None:
        """Kill every child and wait until none is left; remove their files."""
        for child in self.children:
            child.guest.close()
        with contextlib.ExitStack() as stack:
            opened = [Process.open(child.pid) for child in self.children]
            alive = [stack.enter_context(process) for process in opened if process is not None]
            for process in alive:
                process.kill()
            for process in alive:
                if not await process.wait(KILL_TIMEOUT_S):
                    raise EngineError(f"process {process.pid} survives SIGKILL")
        await asyncio.to_thread(files.remove_tree, self.folder)


@dataclass(frozen=True, slots=True)
class Bed:
    """A zygote, ready to be forked."""

    folder: Path
    zygote_pid: int
    start_ms: float

    @contextlib.asynccontextmanager
    async def fork(self, n: int, ask: Ask | None = None) -> AsyncIterator[Herd]:
        """Fork `n` children; they are alive within the block and gone after it.

        Args:
            n: How many.
            ask: Asked of each child as soon as it is ready; without it, nobody talks
                to a child before all are ready.

        Raises:
            EngineError: A child failed; a figure of fewer than `n` would be worth nothing.
        """
        herd = Herd(Path(tempfile.mkdtemp(prefix="h", dir=self.folder)))
        try:
            try:
                await self._fill(herd, [_config(herd.folder) for _ in range(n)], ask)
            except BaseExceptionGroup as group:
                raise _first_of(group) from group
            yield herd
        finally:
            await herd.end()

    async def _fill(
        self,
        herd: Herd,
        configs: list[ChildConfig],
        ask: Ask | None,
    ) -> None:
        folders = {config.id: config.directory for config in configs}
        failed: list[ChildFailed] = []
        async with (
            await Control.connect(self.folder / ZYGOTE_SOCKET) as control,
            asyncio.TaskGroup() as group,
        ):
            clock = Stopwatch()

            def note(outcome: ChildReady | ChildFailed) -> None:
                if isinstance(outcome, ChildFailed):
                    failed.append(outcome)
                    return
                guest = Guest(folders[outcome.id] / VSOCK_SOCKET)
                child = Child(outcome.pid, guest, outcome.times, clock.ms())
                herd.children.append(child)
                if ask is not None:
                    group.create_task(_first_question(child, ask, clock))

            await control.fork(configs, deadline_s=FORK_DEADLINE_S, on_outcome=note)
        if failed or len(herd.children) < len(configs):
            why = f"{failed[0].stage}: {failed[0].message}" if failed else "no event came"
            raise EngineError(f"{len(herd.children)} of {len(configs)} were forked; {why}")


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that the others followed from."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


async def _first_question(child: Child, ask: Ask, clock: Stopwatch) -> None:
    await ask(child.guest)
    child.asked_ms = clock.ms()


def _config(folder: Path) -> ChildConfig:
    id_ = new_sandbox_id()
    directory = folder / id_
    directory.mkdir(mode=0o700)
    return ChildConfig(id_, directory, id_, secrets.token_hex(16), str(uuid.uuid4()))


@contextlib.contextmanager
def settings(programs: Programs, cache: Path, work: Path) -> Iterator[HostSettings]:
    """Give folders of our own below `work`, and remove them after.

    The cache may be read-only, as it is in the helper machine: only its locks are ours.
    """
    state = Path(tempfile.mkdtemp(prefix="bench-", dir=work))
    run = Path(tempfile.mkdtemp(prefix="fkb-", dir="/tmp"))
    try:
        ours = state / "cache"
        (ours / "locks").mkdir(parents=True)
        for name in ("kernels", "initramfs", "images"):
            (ours / name).symlink_to(cache / name)
        yield HostSettings(
            vmm=programs.vmm, agent=programs.agent, cache_dir=ours, state_dir=state, run_dir=run
        )
    finally:
        shutil.rmtree(run)
        shutil.rmtree(state)


async def bake(host: HostSettings, recipe: Path, tell: Callable[[str], None]) -> Baked:
    """Bake the recipe's snapshot, and note when each stage began.

    Raises:
        BuildError: It could not be baked.
    """
    service = HostService(host)
    await service.start()
    try:
        clock = Stopwatch()
        stages: list[tuple[str, float]] = []
        async with contextlib.aclosing(
            service.create_snapshot(SnapshotRequest(TAG, recipe))
        ) as events:
            async for event in events:
                if not isinstance(event, Progress):
                    stages.append(("publish", clock.ms()))
                    return Baked(event, _durations(stages, clock.ms()), host)
                tell(f"bake: {event.message}")
                if not stages or stages[-1][0] != event.stage:
                    stages.append((event.stage, clock.ms()))
    finally:
        await service.stop()
    raise BuildError("the bake ended without a snapshot")


def _durations(stages: list[tuple[str, float]], total_ms: float) -> Json:
    """Return how long each stage took: until the next one began."""
    ends = [began for _, began in stages[1:]] + [total_ms]
    taken = {name: (ended - began) / 1e3 for (name, began), ended in zip(stages, ends, strict=True)}
    return {**taken, "total": total_ms / 1e3}


@contextlib.asynccontextmanager
async def zygote(baked: Baked) -> AsyncIterator[Bed]:
    """Start a zygote on a baked snapshot; it is gone after the block."""
    store = SnapshotStore(baked.settings.state_dir)
    manifest, stored = store.load(TAG), store.folder(TAG)
    layers = (store.rootfs(manifest.image_key), stored / LAYER_FILE)
    folder = Path(tempfile.mkdtemp(prefix="z", dir=baked.settings.run_dir))
    config = ZygoteConfig(
        directory=folder,
        state=stored / STATE_FILE,
        memory=(stored / MEMORY_FILE,),
        disk=DiskConfig(layers, manifest.disk_bytes),
    )
    clock = Stopwatch()
    process = await start_zygote(baked.settings.vmm, config)
    with process:
        try:
            yield Bed(folder, process.pid, clock.ms())
        finally:
            await end(process)
