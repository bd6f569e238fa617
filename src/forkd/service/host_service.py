"""The service on a real host: `forkd.service.api.Service`, which documents its methods.

It composes and decides nothing: snapshots, sandboxes and zygotes each have a module.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from forkd.errors import Conflict, ForkdError, HostError
from forkd.host import files, proc
from forkd.model.ids import SandboxId, Tag, is_sandbox_id
from forkd.model.sandbox import BranchOptions, ForkOptions, SandboxState, check_fork_count
from forkd.service import console, differences, host_info, images
from forkd.service.guests import GuestOperations
from forkd.service.links import Links, LinkTools
from forkd.service.packs import PackOperations, Packs
from forkd.service.recovery import recover
from forkd.service.registry import Registry
from forkd.service.resources import Resources
from forkd.service.sandboxes import Origin, Sandboxes, SandboxTools
from forkd.service.snapshot_operations import SnapshotOperations
from forkd.service.snapshots import Snapshots, SnapshotTools
from forkd.service.tasks import TaskOwner, to_end
from forkd.service.trees import Trees
from forkd.service.zygotes import ZygotePool
from forkd.store.database import Database
from forkd.store.pending import PendingStore
from forkd.store.snapshots import SnapshotStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from pathlib import Path

    from forkd.engine.guest import Guest
    from forkd.model.diff import Difference
    from forkd.model.host import HostInfo
    from forkd.model.image import Image
    from forkd.model.progress import Progress
    from forkd.model.sandbox import (
        BranchResult,
        ForkResult,
        Promotion,
        Sandbox,
    )
    from forkd.model.tree import TreeBudgets, TreeNode
    from forkd.service.links import Claim, Writing
    from forkd.service.seeds import Seed
    from forkd.service.settings import HostSettings

T = TypeVar("T")

LOCK_FILE = "daemon.lock"
DATABASE_FILE = "forkd.db"

log = logging.getLogger(__name__)


class HostService(GuestOperations, SnapshotOperations, PackOperations):
    """Everything a front end may ask, on this host."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._resources = Resources(settings)
        self._store = SnapshotStore(settings.state_dir)
        self._tasks = TaskOwner()
        self._held = contextlib.ExitStack()
        self._started_at_s = time.monotonic()
        self._zygotes = ZygotePool(settings, self._tasks)
        pending = PendingStore(settings.state_dir)
        self._registry = Registry(self._store, pending, self._alive_of)
        self._snapshots = Snapshots(
            SnapshotTools(
                settings, self._tasks, self._store, pending, self._registry, self._zygotes
            )
        )
        self._links = Links(
            LinkTools(
                self._tasks,
                self._store,
                pending,
                self._registry,
                self._zygotes,
                self._snapshots.chain,
            )
        )
        self._packs = Packs(self._store, self._registry, self._snapshots.drop_unused_images)
        self._pending = pending
        self._sandboxes_: Sandboxes | None = None
        self._trees_: Trees | None = None

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
        self._sandboxes_ = self._trees_ = None
        self._held.close()

    async def host_info(self) -> HostInfo:
        """Say what this host is and how full it is."""
        return await asyncio.to_thread(
            host_info.read,
            self._settings,
            self._resources,
            snapshots=len(self._registry.list_all()),
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

    async def fork(self, tag: Tag, count: int, options: ForkOptions) -> ForkResult:
        """Fork sandboxes."""
        check_fork_count(count)
        if options.wait:
            await self._registry.wait_ready(tag)
        self._registry.get_ready(tag)
        return await self._wanted(
            self._fork(tag, count, options), lambda result: result, f"fork {count} of {tag}"
        )

    async def branch(
        self,
        sandbox: SandboxId,
        count: int,
        options: BranchOptions,
        *,
        tag: Tag | None = None,
        wait: bool = True,
    ) -> BranchResult:
        """Branch a running sandbox."""
        if tag is None or count != 0:
            check_fork_count(count)
        return await self._wanted(
            self._branch(sandbox, count, options, tag, wait=wait),
            lambda result: result.fork,
            f"branch {count} of {sandbox}",
        )

    async def reset(self, sandbox: SandboxId, *, deadline_s: float) -> float:
        """Take a sandbox back to its fork point."""
        return await to_end(self._trees.reset(sandbox, deadline_s))

    async def promote(self, sandbox: SandboxId) -> Promotion:
        """Let a sandbox take its parent's place."""
        return await to_end(self._trees.promote(sandbox))

    async def diff(self, before: SandboxId | Tag, after: SandboxId | Tag) -> Difference:
        """Say how one machine differs from another."""
        shared = differences.common(self._chain_of(before), self._chain_of(after))
        chain = await asyncio.to_thread(self._snapshots.chain, shared)
        disk = chain[-1].disk
        if disk is None:
            raise Conflict(f"what goes back to {shared} has no disk", tag=shared)
        ground = differences.Ground(self._settings.vmm, self._store, disk)
        return await differences.between(ground, self._copy(before), self._copy(after))

    async def tree(self, member: SandboxId | None = None) -> tuple[TreeNode, ...]:
        """Return every tree, or that of one sandbox."""
        return await self._trees.draw(member)

    async def tree_budgets(self) -> TreeBudgets:
        """Return how far a tree may grow."""
        return self._trees.budgets

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
        state, reason = owner.sandbox.state, owner.sandbox.exit_reason
        if state is not SandboxState.RUNNING:
            why = f": {reason}" if reason else ""
            raise Conflict(f"sandbox {sandbox} is {state}{why}", sandbox=sandbox)
        return owner.guest

    @property
    def _sandboxes(self) -> Sandboxes:
        if self._sandboxes_ is None:
            raise Conflict("the service does not run")
        return self._sandboxes_

    @property
    def _trees(self) -> Trees:
        if self._trees_ is None:
            raise Conflict("the service does not run")
        return self._trees_

    def _chain_of(self, name: SandboxId | Tag) -> tuple[Tag, ...]:
        """Return the snapshots that a sandbox or a snapshot goes back to, base first."""
        if is_sandbox_id(name):
            tag = self._sandboxes.owner(SandboxId(name)).sandbox.tag
        else:
            tag = Tag(name)
        return self._registry.chain(tag)

    @contextlib.asynccontextmanager
    async def _copy(self, name: SandboxId | Tag) -> AsyncGenerator[differences.Copy, None]:
        """Give a sibling of a sandbox, or a fork of a snapshot, that is gone after the block."""
        if is_sandbox_id(name):
            options = BranchOptions(all_or_nothing=True, kept=False)
            result = (await self.branch(SandboxId(name), 1, options)).fork
            pid = self._sandboxes.owner(SandboxId(name)).sandbox.pid
        else:
            result = await self.fork(Tag(name), 1, ForkOptions(all_or_nothing=True, kept=False))
            pid = result.sandboxes[0].pid
        owner = self._sandboxes.owner(result.sandboxes[0].id)
        try:
            yield differences.Copy(owner.control, owner.guest, pid)
        finally:
            await to_end(self.delete_sandbox(owner.sandbox.id))

    def _alive_of(self, tag: Tag) -> tuple[SandboxId, ...]:
        return tuple(sandbox.id for sandbox in self._sandboxes.alive(tag))

    def _seed_of(self, sandbox: SandboxId) -> contextlib.AbstractAsyncContextManager[Seed]:
        return self._trees.seed(sandbox)

    async def _start(self) -> None:
        settings = self._settings
        proc.raise_open_files_limit()
        await asyncio.to_thread(self._prepare_folders)
        for folder in (settings.state_dir, settings.run_dir):
            if not self._held.enter_context(files.try_lock(folder / LOCK_FILE)):
                raise Conflict(f"another daemon uses {folder}")
        if self._resources.cgroups.usable():
            self._resources.cgroups.prepare()
            self._held.callback(self._resources.cgroups.close)
        database = await asyncio.to_thread(Database, settings.state_dir / DATABASE_FILE)
        self._held.callback(database.close)
        adopted = await recover(settings, database, self._resources)
        # Nobody writes any more what is left there of an earlier daemon.
        await asyncio.to_thread(self._store.prepare)
        await asyncio.to_thread(self._pending.prepare)
        await self._tasks.start()
        tools = SandboxTools(database, self._resources, self._tasks, settings.network)
        self._sandboxes_ = Sandboxes(tools)
        self._trees_ = Trees(settings, self._sandboxes_)
        for row in adopted:
            self._sandboxes_.adopt(row)
            if row.renaming:
                finishing = self._trees_.finish_promotion(row.sandbox.id)
                self._tasks.spawn(finishing, name=f"finish promotion of {row.sandbox.id}")
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
            # Checked again, with nothing between this and the lease, which is noticed.
            self._registry.get_ready(tag)
            async with self._zygotes.lease(tag, lambda: self._snapshots.chain(tag)) as zygote:
                origin = Origin(tag, lambda: contextlib.nullcontext(zygote))
                return await self._sandboxes.fork(origin, count, options)
        except ForkdError as error:
            return error

    async def _branch(
        self, sandbox: SandboxId, count: int, options: BranchOptions, tag: Tag | None, *, wait: bool
    ) -> BranchResult | ForkdError:
        """Branch; returns the error that ended it, so that the caller raises it."""
        try:
            if tag is None:
                return await self._trees.branch(sandbox, count, options)
            claim = await self._links.begin(tag, await self.get_sandbox(sandbox))
            return await self._branch_and_write(claim, sandbox, count, options, wait=wait)
        except ForkdError as error:
            return error

    async def _branch_and_write(
        self, claim: Claim, sandbox: SandboxId, count: int, options: BranchOptions, *, wait: bool
    ) -> BranchResult:
        """Branch, and have the same instant written down under the tag that was claimed."""
        writing: Writing | None = None

        async def write(seed: Seed) -> None:
            nonlocal writing
            writing = await self._links.start(claim, seed, keep_error=not wait)

        try:
            result = await self._trees.branch(sandbox, count, options, on_seed=write)
        except BaseException:
            if writing is None:
                await self._links.give_up(claim, None)
            raise
        if wait and writing is not None:
            try:
                await self._links.ended(writing)
            except BaseException:
                await to_end(self._sandboxes.delete_all(s.id for s in result.fork.sandboxes))
                raise
        return replace(result, snapshot=self._registry.get(claim.tag))

    async def _wanted(
        self,
        work: Coroutine[object, object, T | ForkdError],
        made: Callable[[T], ForkResult],
        name: str,
    ) -> T:
        """Make sandboxes in a task of its own, which is finished even if the caller goes away.

        Nobody wants the sandboxes then, and they are deleted.
        """
        task = self._tasks.spawn(work, name=name)
        try:
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: self._delete_unwanted(done, made))
            raise
        if isinstance(outcome, ForkdError):
            raise outcome
        return outcome

    def _delete_unwanted(
        self, task: asyncio.Task[T | ForkdError], made: Callable[[T], ForkResult]
    ) -> None:
        """Delete the sandboxes of a fork whose caller went away."""
        outcome = None if task.cancelled() else task.result()
        if outcome is None or isinstance(outcome, ForkdError):
            return
        ids = [sandbox.id for sandbox in made(outcome).sandboxes]
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
