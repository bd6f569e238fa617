"""The test bed: a baked snapshot, its zygote, and herds of children forked from it.

It drives the engine itself, without a daemon, so that the figures are of forking.  The
snapshot is baked by the service, as a daemon would; then a zygote is started on its files.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shutil
import tempfile
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Json, Stopwatch
from forkd.engine.configs import (
    BranchConfig,
    ChildConfig,
    DeriveConfig,
    DiskConfig,
    Identity,
    LinkConfig,
    ZygoteConfig,
)
from forkd.engine.control import Control
from forkd.engine.guest import Guest
from forkd.engine.process import (
    CONSOLE_LOG,
    CONTROL_SOCKET,
    VSOCK_SOCKET,
    ZYGOTE_SOCKET,
    end,
    end_listener,
    log_tail,
    start_zygote,
)
from forkd.engine.replies import ChildFailed, ChildReady
from forkd.errors import BuildError, EngineError, EngineExited
from forkd.host import files, proc
from forkd.host.spawn import Process
from forkd.images.recipe import RECIPE_FILE_NAME
from forkd.model.caller import local_caller
from forkd.model.ids import new_sandbox_id, parse_tag
from forkd.model.progress import Progress
from forkd.model.snapshot import SnapshotRequest
from forkd.service.host import open_host
from forkd.service.settings import HostSettings
from forkd.store.snapshots import LAYER_FILE, MEMORY_FILE, STATE_FILE, SnapshotStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    Ask = Callable[[Guest], Awaitable[object]]

    from forkd.engine.replies import SpawnStages
    from forkd.model.ids import Tag
    from forkd.model.json import JsonValue
    from forkd.model.snapshot import Snapshot

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
"""The recipes of this repository."""

TAG = parse_tag("bench")
LARGE_TAG = parse_tag("bench-large")

FORK_DEADLINE_S = 600.0
"""How long one child may take: a thousand of them share two emulated processors."""

KILL_TIMEOUT_S = 120.0
"""How long the kernel may take to end a herd."""

EVAL_TIMEOUT_S = 600.0
"""How long a guest may take to evaluate something: it may write to a gigabyte first."""

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
        directory: Its folder.
        ready_ms: From the request to the event that said so, as its client saw them.
        asked_ms: From the request to the answer of the first question; None without one.
    """

    pid: int
    directory: Path
    guest: Guest
    times: SpawnStages
    ready_ms: float
    asked_ms: float | None = None

    async def control(self) -> Control:
        """Return a connection for requests to its machine."""
        return await Control.connect(self.directory / CONTROL_SOCKET)

    async def answer(self, ask: Ask) -> None:
        """Ask it something; raises as `explained`."""
        with self.explained():
            await ask(self.guest)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say what became of its machine, if that ends a connection within the block.

        Raises:
            EngineError: It did.
        """
        try:
            yield
        except EngineExited as error:
            raise EngineError(f"{error}: {self.story()}") from error

    def story(self) -> str:
        """Say what is left of its machine."""
        became = "lives" if proc.name(self.pid) else "has ended"
        return f"its process {became}; its console: {log_tail(self.directory / CONSOLE_LOG)}"

    async def value(self, code: str) -> JsonValue:
        """Have its warm runtime evaluate what must not raise; return the value.

        Raises:
            EngineError: It raised.
        """
        with self.explained():
            result = await self.guest.eval(code, EVAL_TIMEOUT_S)
        if result.error is not None:
            raise EngineError(f"a guest raised {result.error.traceback}")
        return result.value


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
                await child.answer(ask)
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
    """A zygote, ready to be forked.

    Attributes:
        folder: Where it listens.
        chain: The memory files that it was loaded from, base first.
        disk: The layers of its disk.
        start_ms: How long it took to listen.
        pause_ms: For a seed, how long its source was paused.
    """

    folder: Path
    chain: tuple[Path, ...]
    disk: DiskConfig
    start_ms: float
    pause_ms: float = 0.0

    @contextlib.asynccontextmanager
    async def branch(self, source: Child) -> AsyncIterator[Bed]:
        """Have a child leave a seed of itself, which is gone after the block.

        Raises:
            ForkdError: The child refused.
        """
        folder = Path(tempfile.mkdtemp(prefix="b", dir=self.folder.parent))
        try:
            clock = Stopwatch()
            with source.explained():
                async with await source.control() as control:
                    branched = await control.branch(BranchConfig(folder))
            yield replace(self, folder=folder, start_ms=clock.ms(), pause_ms=branched.pause_ms)
        finally:
            await end_listener(folder / ZYGOTE_SOCKET)
            await asyncio.to_thread(files.remove_tree, folder)

    async def save(self, folder: Path, *, whole: bool = False) -> int:
        """Have what this seed holds written to `folder`; return how many bytes that were.

        Args:
            folder: Existing and empty.
            whole: Not only what it holds beyond its chain.

        Raises:
            ForkdError: It could not be written.
        """
        link = LinkConfig(folder, self.chain, len(self.disk.layers))
        async with await Control.connect(self.folder / ZYGOTE_SOCKET) as control:
            saved = await control.save_link(LinkConfig(folder) if whole else link)
        return sum(file.bytes for file in saved)

    @contextlib.asynccontextmanager
    async def derive(self, link: Path) -> AsyncIterator[Bed]:
        """Put a saved link over this zygote; the new one is gone after the block.

        Raises:
            ForkdError: The link is damaged.
        """
        folder = Path(tempfile.mkdtemp(prefix="z", dir=self.folder.parent))
        disk = replace(self.disk, layers=(*self.disk.layers, link / LAYER_FILE))
        config = DeriveConfig(folder, link / STATE_FILE, link / MEMORY_FILE, disk)
        try:
            clock = Stopwatch()
            async with await Control.connect(self.folder / ZYGOTE_SOCKET) as control:
                await control.derive(config)
            yield Bed(folder, (*self.chain, config.memory), disk, clock.ms())
        finally:
            await end_listener(folder / ZYGOTE_SOCKET)
            await asyncio.to_thread(files.remove_tree, folder)

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
                raise first_of(group) from group
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
                folder = folders[outcome.id]
                guest = Guest(folder / VSOCK_SOCKET, connect_timeout_s=FORK_DEADLINE_S)
                child = Child(outcome.pid, folder, guest, outcome.ms, clock.ms())
                herd.children.append(child)
                if ask is not None:
                    group.create_task(_first_question(child, ask, clock))

            await control.fork(configs, deadline_s=FORK_DEADLINE_S, on_outcome=note)
        if failed or len(herd.children) < len(configs):
            why = f"{failed[0].stage}: {failed[0].message}" if failed else "no event came"
            raise EngineError(f"{len(herd.children)} of {len(configs)} were forked; {why}")


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that the others followed from."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


async def _first_question(child: Child, ask: Ask, clock: Stopwatch) -> None:
    await child.answer(ask)
    child.asked_ms = clock.ms()


def _config(folder: Path) -> ChildConfig:
    id_ = new_sandbox_id()
    directory = folder / id_
    directory.mkdir(mode=0o700)
    identity = Identity(id_, secrets.token_hex(16), str(uuid.uuid4()))
    return ChildConfig(id_, directory, identity)


def resized(recipe: Path, folder: Path, memory_mib: int) -> Path:
    """Write a recipe's copy with so much memory to `folder`; it has the same image.

    Raises:
        BuildError: The recipe says nothing of memory.
    """
    shutil.copytree(recipe, folder)
    text, found = re.subn(
        r"^memory_mib = \d+$",
        f"memory_mib = {memory_mib}",
        (folder / RECIPE_FILE_NAME).read_text(),
        flags=re.MULTILINE,
    )
    if found != 1:
        raise BuildError(f"{recipe} does not say how much memory its machine has")
    (folder / RECIPE_FILE_NAME).write_text(text)
    return folder


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
            vmm=programs.vmm,
            agent=programs.agent,
            cache_dir=ours,
            state_dir=state,
            run_dir=run,
            recipe_dirs=(RECIPES, Path("/")),  # by name, too, as bases are
            cgroups=True,
        )
    finally:
        shutil.rmtree(run)
        shutil.rmtree(state)


async def bake(
    host: HostSettings, recipe: Path, tell: Callable[[str], None], tag: Tag = TAG
) -> Baked:
    """Bake the recipe's snapshot, and note when each stage began.

    Raises:
        BuildError: It could not be baked.
    """
    async with open_host(host) as service:
        clock = Stopwatch()
        stages: list[tuple[str, float]] = []
        async with contextlib.aclosing(
            service.snapshots.bake(local_caller(), SnapshotRequest(tag, recipe))
        ) as events:
            async for event in events:
                if not isinstance(event, Progress):
                    stages.append(("publish", clock.ms()))
                    return Baked(event, durations(stages, clock.ms()), host)
                tell(f"bake: {event.message}")
                if not stages or stages[-1][0] != event.stage:
                    stages.append((event.stage, clock.ms()))
    raise BuildError("the bake ended without a snapshot")


def durations(stages: list[tuple[str, float]], total_ms: float) -> Json:
    """Return how long each stage took: until the next one began.

    A recipe over a base has the stages of both: those of one name count together.
    """
    ends = [began for _, began in stages[1:]] + [total_ms]
    taken: Json = {"total": total_ms / 1e3}
    for (name, began), ended in zip(stages, ends, strict=True):
        taken[name] = taken.get(name, 0.0) + (ended - began) / 1e3
    return taken


@contextlib.asynccontextmanager
async def zygote(baked: Baked) -> AsyncIterator[Bed]:
    """Start a zygote on a baked snapshot; it is gone after the block."""
    store, tag = SnapshotStore(baked.settings.state_dir), baked.snapshot.tag
    manifest = store.load(tag)
    rootfs = store.rootfs(manifest.image_key)
    async with zygote_of(baked.settings, store.folder(tag), rootfs, manifest.disk_bytes) as bed:
        yield bed


@contextlib.asynccontextmanager
async def zygote_of(
    host: HostSettings, stored: Path, rootfs: Path, disk_bytes: int
) -> AsyncIterator[Bed]:
    """Start a zygote on the files of a snapshot that depends on no other."""
    disk = DiskConfig((rootfs, stored / LAYER_FILE), disk_bytes)
    folder = Path(tempfile.mkdtemp(prefix="z", dir=host.run_dir))
    config = ZygoteConfig(folder, stored / STATE_FILE, (stored / MEMORY_FILE,), disk)
    clock = Stopwatch()
    process = await start_zygote(host.vmm, config)
    with process:
        try:
            yield Bed(folder, config.memory, disk, clock.ms())
        finally:
            await end(process)
