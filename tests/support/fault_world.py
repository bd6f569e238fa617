"""A host over the fake VMM that faults are injected into, and what must be true of it afterwards.

A `World` has a base snapshot and a running sandbox, the *source*, which every step starts with.
After a step and its fault it must be *well*: every request has ended, nothing has crashed, what is
listed is what there is, a fork, an evaluation and a deletion work, and what a failure has left
behind is gone after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd.engine.control import Control
from forkd.engine.process import CONTROL_SOCKET
from forkd.errors import ForkdError
from forkd.model.sandbox import ForkOptions, Sandbox, SandboxState
from forkd.model.snapshot import SnapshotStatus
from forkd.service.host import Host, open_host
from forkd.service.supervision import TaskKind
from tests.support import processes
from tests.support.callers import CALLER
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from forkd.model.ids import SandboxId, Tag
    from tests.support.service_host import FakeHost

DEADLINE_S = 20.0
"""How long a request may take: none of those of the steps waits for anything slow."""

ANSWER = 42
"""What `answer` is in the base."""


class Complaints(logging.Handler):
    """Keeps what the log, or the interpreter, says of things that nobody expected."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []
        self._hook = sys.unraisablehook

    def start(self) -> None:
        logging.getLogger().addHandler(self)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._note_unraisable

    def stop(self) -> None:
        logging.getLogger().removeHandler(self)
        sys.unraisablehook = self._hook

    def _note_unraisable(self, what: sys.UnraisableHookArgs) -> None:
        self.said.append(f"nobody could be told of {what.exc_value!r} in {what.object!r}")

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.said.append(f"logged {record.getMessage()!r} ({error!r})")


@dataclass
class World:
    """A host, and what it is asked for."""

    fake: FakeHost
    options: ForkOptions = field(default_factory=ForkOptions)
    complaints: Complaints = field(default_factory=Complaints)
    _host: Host | None = None
    _open: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _source: Sandbox | None = None
    _descriptors: Counter[str] | None = None

    @property
    def host(self) -> Host:
        assert self._host is not None, "the host is not open"
        return self._host

    @property
    def source(self) -> SandboxId:
        assert self._source is not None
        return self._source.id

    @property
    def source_pid(self) -> int:
        """The source's process."""
        assert self._source is not None
        assert self._source.pid is not None
        return self._source.pid

    @property
    def control(self) -> Path:
        """The source's control socket."""
        owner = self.host.sandboxes.roster.find(self.source)
        assert owner is not None
        return owner.control

    def machines(self) -> list[int]:
        """Return the processes of all sandboxes that run."""
        alive = self.host.sandboxes.roster.alive()
        return [each.pid for each in alive if each.pid is not None]

    async def open(self) -> None:
        """Open the host unless it is."""
        if self._host is None:
            self._host = await self._open.enter_async_context(open_host(self.fake.settings))

    async def close(self) -> None:
        self._host = None
        await self._open.aclose()

    async def begin(self) -> None:
        """Make what every step starts with, as far as it is missing."""
        await self.open()
        if TAG not in {each.tag for each in await self.host.snapshots.list(CALLER)}:
            await self.fake.bake(self.host, self.fake.recipe())
        listed = {each.id for each in await self.host.sandboxes.list(CALLER)}
        if self._source is None or self._source.id not in listed:
            self._source = await self.fork()

    async def fork(self, tag: Tag = TAG) -> Sandbox:
        (made,) = (await self.host.sandboxes.fork(CALLER, tag, 1, self.options)).sandboxes
        return made

    async def value(self, sandbox: SandboxId, code: str) -> object:
        result = await self.host.guests.eval(CALLER, sandbox, code)
        assert result.error is None, result.error
        return result.value

    async def rest(self) -> None:
        """Return when nothing goes on in the background, and what has ended is seen to have."""
        await until(lambda: not busy() and not self._unseen() and not self._unwritten())

    def _unwritten(self) -> bool:
        """Whether events are still being written, with a file more open than otherwise."""
        return self._host is not None and bool(self._host.journal._unwritten)  # noqa: SLF001 - what there is

    def _unseen(self) -> bool:
        """Whether a process has ended and the host does not know it yet."""
        if self._host is None:
            return False
        pids = [
            each.pid
            for each in self.host.sandboxes.roster.all()
            if each.state is SandboxState.RUNNING and each.pid is not None
        ]
        pids += [zygote.process.pid for zygote in self.zygotes()]
        return any(is_dead(pid) for pid in pids)

    async def clean(self) -> None:
        """Delete what steps have made; what a fault kept from being deleted, too."""
        await self.open()
        await self.rest()
        for sandbox in await self.host.sandboxes.list(CALLER):
            if sandbox.id != self.source or sandbox.state is not SandboxState.RUNNING:
                await self.host.sandboxes.delete(CALLER, sandbox.id)
        for snapshot in reversed(await self.host.snapshots.list(CALLER)):
            if snapshot.tag != TAG:
                await self.host.snapshots.delete(CALLER, snapshot.tag, cascade=True)
        await self.rest()

    # Whether all is well

    async def works(self) -> None:
        """Fork, evaluate and delete."""
        made = await self.fork()
        assert await self.value(made.id, "answer") == ANSWER
        await self.host.sandboxes.delete(CALLER, made.id)

    async def untrue(self) -> list[str]:
        """Return a line for everything at rest that is not as it is listed."""
        found = [*self.complaints.said]
        if self.host.tasks.failure is not None:
            found.append(f"the service has failed: {self.host.tasks.failure}")
        sandboxes = await self.host.sandboxes.list(CALLER)
        for sandbox in sandboxes:
            found += await self._untrue_of(sandbox)
        found += await self._untrue_rows(sandboxes)
        found += await asyncio.to_thread(self._untrue_snapshots, await self._stored())
        return found

    async def _untrue_of(self, sandbox: Sandbox) -> list[str]:
        name = f"sandbox {sandbox.id}"
        match sandbox.state:
            case SandboxState.RUNNING:
                control = self.fake.settings.sandboxes_dir / self.lease(sandbox.id) / CONTROL_SOCKET
                try:
                    async with await Control.connect(control) as machine:
                        if machine.peer_pid() != sandbox.pid:
                            return [f"{name} is process {machine.peer_pid()}, not {sandbox.pid}"]
                    await self.value(sandbox.id, "answer")
                except (ForkdError, AssertionError) as error:
                    return [f"{name} is listed as running: {error!r}"]
            case SandboxState.EXITED:
                return [] if sandbox.exit_reason else [f"{name} has exited without a reason"]
            case SandboxState.STARTING:
                return [f"{name} is listed as starting"]
        return []

    def lease(self, sandbox: SandboxId) -> str:
        owner = self.host.sandboxes.roster.find(sandbox)
        assert owner is not None
        return owner.lease.id

    async def _untrue_rows(self, sandboxes: Iterable[Sandbox]) -> list[str]:
        """Return what the next daemon would not know, or do otherwise."""
        rows = {row.sandbox.id: row for row in await self.host.sandboxes.records.rows()}
        found = []
        for sandbox in sandboxes:
            row = rows.get(sandbox.id)
            if row is None:
                found.append(f"sandbox {sandbox.id} has no row")
            elif (
                sandbox.state is SandboxState.RUNNING
                and row.sandbox.state is not SandboxState.RUNNING
            ):
                found.append(f"sandbox {sandbox.id} runs, and its row says {row.sandbox.state}")
            elif row.lease != self.lease(sandbox.id):
                found.append(f"sandbox {sandbox.id} has another lease than its row")
        return found

    async def _stored(self) -> dict[Tag, SnapshotStatus]:
        return {each.tag: each.status for each in await self.host.snapshots.list(CALLER)}

    def _untrue_snapshots(self, listed: dict[Tag, SnapshotStatus]) -> list[str]:
        store, found = self.host.snapshots.store, []
        for tag, status in listed.items():
            if status is SnapshotStatus.WRITING:
                found.append(f"snapshot {tag} is listed as being written")
            elif status is SnapshotStatus.READY:
                try:
                    store.load_chain(tag)
                except ForkdError as error:
                    found.append(f"snapshot {tag} is listed as ready: {error}")
        strange = set(store.tags()) - listed.keys()
        return [*found, *(f"snapshot {tag} is stored, and not listed" for tag in strange)]

    def leaked(self) -> list[str]:
        """Return a line if this process has more open than the host needs; the first call counts.

        Idle connections to guests are closed for this.
        """
        gc.collect()
        for owner in self.host.sandboxes.roster:
            owner.guest.close()
        now = descriptors()
        zygotes, machines = len(self.zygotes()), len(self.host.sandboxes.roster.alive())
        pidfds = {"anon_inode:[pidfd]": zygotes + machines}
        now.subtract({**pidfds, "socket": zygotes, "pipe": zygotes})
        if self._descriptors is None:
            self._descriptors = now
        return [f"leaked {count} of {kind}" for kind, count in (now - self._descriptors).items()]

    def zygotes(self) -> list[Any]:
        """Return the zygotes that the host holds."""
        entries = self.host.sandboxes.zygotes._entries.values()  # noqa: SLF001 - what there is
        return [entry.zygote for entry in entries if entry.zygote is not None]

    def left_over(self) -> list[str]:
        """Return what is on the host and belongs to nothing that is listed.

        What ends by itself, as a retired seed does, is awaited.
        """
        settings, host = self.fake.settings, self.host
        pids = {each.pid for each in host.sandboxes.roster.alive()}
        pids |= {zygote.process.pid for zygote in self.zygotes()}
        owned = {owner.lease.directory for owner in host.sandboxes.roster}
        owned |= {zygote.directory for zygote in self.zygotes()}
        folders = (settings.sandboxes_dir, settings.zygotes_dir, settings.bakes_dir)
        state = settings.state_dir
        paths = [path for folder in folders for path in folder.iterdir() if path not in owned]
        paths += [path for name in ("staging", "writing") for path in (state / name).iterdir()]
        paths += (state / "recipes").glob(".partial-*")
        strays = processes.surviving(set(self.fake.vmm_processes()) - pids)
        found = [f"process {pid}" for pid in sorted(strays)]
        return found + [str(path.relative_to(Path(settings.run_dir.anchor))) for path in paths]

    async def restart(self) -> None:
        """Close and open the host; everybody who runs goes on running."""
        await self.close()
        await self.open()


def descriptors() -> Counter[str]:
    """Return how many files of which kind or name this process has open."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one by which the folder is read
            # Sockets and pipes have numbers.
            found[re.sub(r":\[\d+\]$", "", str(link.readlink()))] += 1
    return found


def is_dead(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return ") Z " in stat


LASTING = tuple(f"{kind} " for kind in (TaskKind.OWNER, TaskKind.JOURNAL, TaskKind.CLOCK))
"""How the names of tasks begin that live as long as a sandbox, or as the host."""


def busy() -> list[str]:
    """Return what goes on in this event loop beside its caller and what goes on for ever."""
    mine = asyncio.current_task()
    names = [each.get_name() for each in asyncio.all_tasks() if each is not mine]
    return [name for name in names if not name.startswith(LASTING)]


async def outcome_of(work: Awaitable[object]) -> ForkdError | str | None:
    """Do what a request asks for; return our error, or what should not have happened."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            await work
    except ForkdError as error:
        # Its frames would keep files open that are closed otherwise.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error
    except TimeoutError:
        return f"it hangs; what goes on is {busy()}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return f"it raised {error!r}"
    return None
