"""The service on a real host: `forkd.service.api.Service`, which documents its methods.

It composes and decides nothing: snapshots, sandboxes and zygotes each have a module.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from forkd.errors import Conflict, ForkdError, HostError
from forkd.host import files, proc
from forkd.model.sandbox import SandboxState, check_fork_count
from forkd.service import console, host_info, images
from forkd.service.guests import GuestOperations
from forkd.service.recovery import recover
from forkd.service.resources import Resources
from forkd.service.sandboxes import Sandboxes, SandboxTools
from forkd.service.snapshots import Snapshots, SnapshotTools
from forkd.service.tasks import TaskOwner
from forkd.service.zygotes import ZygotePool
from forkd.store.database import Database
from forkd.store.snapshots import SnapshotStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from forkd.engine.guest import Guest
    from forkd.model.host import HostInfo
    from forkd.model.ids import SandboxId, Tag
    from forkd.model.image import Image
    from forkd.model.progress import Progress
    from forkd.model.sandbox import ForkOptions, ForkResult, Sandbox
    from forkd.model.snapshot import Snapshot, SnapshotRequest
    from forkd.service.settings import HostSettings

LOCK_FILE = "daemon.lock"
DATABASE_FILE = "forkd.db"

log = logging.getLogger(__name__)


class HostService(GuestOperations):
    """Everything a front end may ask, on this host."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._resources = Resources(settings)
        self._store = SnapshotStore(settings.state_dir)
        self._tasks = TaskOwner()
        self._held = contextlib.ExitStack()
        self._started_at_s = time.monotonic()
        self._zygotes = ZygotePool(settings, self._tasks)
        self._snapshots = Snapshots(
            SnapshotTools(settings, self._tasks, self._store, self._count_alive)
        )
        self._sandboxes_: Sandboxes | None = None

    async def start(self) -> None:
        """Adopt what runs, reap what is dead or half-made, and begin to serve.

        Raises:
            Conflict: Another daemon has the same state or run folder.
            StoreError: The database is damaged.
            HostError: The kernel refused something.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Let go of everything; sandboxes live on, bakes in progress are undone."""
        await self._tasks.stop()
        await self._zygotes.stop_all()
        self._sandboxes_ = None
        self._held.close()

    async def host_info(self) -> HostInfo:
        """Say what this host is and how full it is."""
        return await asyncio.to_thread(
            host_info.read,
            self._settings,
            self._resources,
            snapshots=len(self._snapshots.list_all()),
            sandboxes=len(self._sandboxes.alive()),
            uptime_s=time.monotonic() - self._started_at_s,
        )

    async def build_image(self, recipe_path: Path) -> AsyncGenerator[Progress | Image, None]:
        """Build the image of a recipe."""
        events: asyncio.Queue[Progress | None] = asyncio.Queue()
        task = self._tasks.spawn(self._build(recipe_path, events), name=f"build {recipe_path}")
        try:
            while (event := await events.get()) is not None:
                yield event
            outcome = await task
        finally:
            task.cancel()
            await asyncio.wait([task])
        if isinstance(outcome, ForkdError):
            raise outcome
        yield outcome

    async def create_snapshot(
        self, request: SnapshotRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Bake a snapshot."""
        async with contextlib.aclosing(self._snapshots.create(request)) as events:
            async for event in events:
                yield event

    async def list_snapshots(self) -> tuple[Snapshot, ...]:
        """Return every snapshot."""
        return self._snapshots.list_all()

    async def get_snapshot(self, tag: Tag) -> Snapshot:
        """Return one snapshot."""
        return self._snapshots.get(tag)

    async def delete_snapshot(self, tag: Tag) -> None:
        """Remove a snapshot."""
        self._snapshots.get(tag)
        if self._zygotes.in_use(tag):
            raise Conflict(f"snapshot {tag} is being forked", tag=tag)
        alive = tuple(sandbox.id for sandbox in self._sandboxes.alive(tag))
        await self._snapshots.delete(tag, alive)
        await self._zygotes.stop(tag)

    async def fork(self, tag: Tag, count: int, options: ForkOptions) -> ForkResult:
        """Fork sandboxes."""
        check_fork_count(count)
        self._snapshots.get_ready(tag)
        task = self._tasks.spawn(self._fork(tag, count, options), name=f"fork {count} of {tag}")
        try:
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._delete_unwanted)
            raise
        if isinstance(outcome, ForkdError):
            raise outcome
        return outcome

    async def list_sandboxes(self, tag: Tag | None = None) -> tuple[Sandbox, ...]:
        """Return every sandbox."""
        return self._sandboxes.list_all(tag)

    async def get_sandbox(self, sandbox: SandboxId) -> Sandbox:
        """Return one sandbox."""
        return self._sandboxes.owner(sandbox).sandbox

    async def delete_sandbox(self, sandbox: SandboxId) -> None:
        """End a sandbox."""
        await self._sandboxes.owner(sandbox).delete()

    async def console_log(self, sandbox: SandboxId) -> bytes:
        """Return the end of what the guest wrote to its console."""
        return await asyncio.to_thread(console.read, self._sandboxes.owner(sandbox).directory)

    async def follow_console_log(self, sandbox: SandboxId) -> AsyncGenerator[bytes, None]:
        """Yield the console log as it grows."""
        owner = self._sandboxes.owner(sandbox)

        def alive() -> bool:
            return owner.sandbox.state is SandboxState.RUNNING

        async with contextlib.aclosing(console.follow(owner.directory, alive)) as pieces:
            async for piece in pieces:
                yield piece

    def _guest(self, sandbox: SandboxId) -> Guest:
        owner = self._sandboxes.owner(sandbox)
        if owner.sandbox.state is not SandboxState.RUNNING:
            raise Conflict(f"sandbox {sandbox} is {owner.sandbox.state}", sandbox=sandbox)
        return owner.guest

    @property
    def _sandboxes(self) -> Sandboxes:
        if self._sandboxes_ is None:
            raise Conflict("the service does not run")
        return self._sandboxes_

    def _count_alive(self, tag: Tag) -> int:
        return len(self._sandboxes.alive(tag))

    async def _start(self) -> None:
        settings = self._settings
        proc.raise_open_files_limit()
        await asyncio.to_thread(self._prepare_folders)
        for folder in (settings.state_dir, settings.run_dir):
            if not self._held.enter_context(files.try_lock(folder / LOCK_FILE)):
                raise Conflict(f"another daemon uses {folder}")
        await asyncio.to_thread(self._store.prepare)
        if self._resources.cgroups.usable():
            self._resources.cgroups.prepare()
            self._held.callback(self._resources.cgroups.close)
        database = await asyncio.to_thread(Database, settings.state_dir / DATABASE_FILE)
        self._held.callback(database.close)
        adopted = await recover(settings, database, self._resources)
        await self._tasks.start()
        tools = SandboxTools(database, self._resources, self._tasks, settings.network)
        self._sandboxes_ = Sandboxes(tools)
        for row in adopted:
            self._sandboxes_.adopt(row)
        await self._snapshots.start()
        log.info("service started", extra={"sandboxes": len(adopted)})

    def _prepare_folders(self) -> None:
        settings = self._settings
        try:
            for folder in (
                settings.state_dir,
                settings.run_dir,
                settings.sandboxes_dir,
                settings.zygotes_dir,
                settings.bakes_dir,
            ):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise HostError(f"cannot make {error.filename}: {error.strerror}") from error

    async def _fork(self, tag: Tag, count: int, options: ForkOptions) -> ForkResult | ForkdError:
        """Fork; returns the error that ended it, so that the caller raises it."""
        try:
            async with self._zygotes.lease(
                tag, lambda: self._snapshots.zygote_files(tag)
            ) as zygote:
                return await self._sandboxes.fork(zygote, tag, count, options)
        except ForkdError as error:
            return error

    def _delete_unwanted(self, task: asyncio.Task[ForkResult | ForkdError]) -> None:
        """Delete the sandboxes of a fork whose caller went away."""
        outcome = None if task.cancelled() else task.result()
        if outcome is None or isinstance(outcome, ForkdError):
            return
        ids = [sandbox.id for sandbox in outcome.sandboxes]
        with contextlib.suppress(Conflict):  # the service is stopping; they live on
            self._tasks.spawn(self._sandboxes.delete_all(ids), name="delete unwanted sandboxes")

    async def _build(
        self, recipe_path: Path, events: asyncio.Queue[Progress | None]
    ) -> Image | ForkdError:
        try:
            built = await images.build(self._settings, recipe_path, events.put_nowait)
        except ForkdError as error:
            return error
        else:
            return built.image
        finally:
            events.put_nowait(None)
