"""What is done with snapshots: each method finds who does it.

`forkd.service.api.SnapshotService` documents every method.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.model.exec import ExecRequest, Exited, Stderr, Stdout
from forkd.model.ids import SandboxId, Tag
from forkd.model.progress import Progress
from forkd.model.sandbox import ForkOptions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager

    from forkd.engine.guest_exec import GuestExec
    from forkd.model.sandbox import ForkResult, Sandbox
    from forkd.model.snapshot import LinkRequest, Removed, Snapshot, SnapshotRequest
    from forkd.service.links import Links
    from forkd.service.registry import Registry
    from forkd.service.seeds import Seed
    from forkd.service.snapshots import Snapshots

LINE_CHARS_MAX = 200
"""How much of a line that a command prints is shown as progress."""

LAST_LINES = 5
"""How many of them go into the error of a command that failed."""


class SnapshotOperations(ABC):
    """The part of the service that keeps snapshots; a base of `HostService`."""

    _snapshots: Snapshots
    _links: Links
    _registry: Registry

    @abstractmethod
    def _seed_of(self, sandbox: SandboxId) -> AbstractAsyncContextManager[Seed]:
        """Branch a running sandbox."""

    @abstractmethod
    async def get_sandbox(self, sandbox: SandboxId) -> Sandbox:
        """Return one sandbox."""

    @abstractmethod
    async def fork(self, tag: Tag, count: int, options: ForkOptions) -> ForkResult:
        """Fork sandboxes."""

    @abstractmethod
    async def exec(self, sandbox: SandboxId, request: ExecRequest) -> GuestExec:
        """Start a command."""

    @abstractmethod
    async def delete_sandbox(self, sandbox: SandboxId) -> None:
        """End a sandbox."""

    async def create_snapshot(
        self, request: SnapshotRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Bake a snapshot."""
        async with contextlib.aclosing(self._snapshots.create(request)) as events:
            async for event in events:
                yield event

    async def snapshot_sandbox(self, sandbox: SandboxId, tag: Tag, *, wait: bool) -> Snapshot:
        """Write a running sandbox down."""
        source = await self.get_sandbox(sandbox)
        return await self._links.snapshot(tag, source, lambda: self._seed_of(sandbox), wait=wait)

    async def link_snapshot(
        self, request: LinkRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Take a durable snapshot of a sandbox, or of a fork in which a command has run."""
        if request.of_sandbox:
            sandbox = SandboxId(request.source)
            yield Progress("branch", None, f"branching {sandbox}")
            yield await self.snapshot_sandbox(sandbox, request.tag, wait=request.wait)
            return
        parent = Tag(request.source)
        self._registry.check_claim(request.tag, parent)
        yield Progress("fork", None, f"forking {parent}")
        options = ForkOptions(network=request.network, all_or_nothing=True, kept=False)
        (forked,) = (await self.fork(parent, 1, options)).sandboxes
        try:
            async with contextlib.aclosing(self._run(forked.id, request)) as steps:
                async for step in steps:
                    yield step
            yield Progress("save", None, f"writing what differs from {parent}")
            made = await self.snapshot_sandbox(forked.id, request.tag, wait=request.wait)
        finally:
            await self.delete_sandbox(forked.id)
        yield made

    async def list_snapshots(self) -> tuple[Snapshot, ...]:
        """Return every snapshot."""
        return self._registry.list_all()

    async def get_snapshot(self, tag: Tag) -> Snapshot:
        """Return one snapshot."""
        return self._registry.get(tag)

    async def delete_snapshot(
        self, tag: Tag, *, cascade: bool = False, force: bool = False
    ) -> None:
        """Remove a snapshot."""
        await self._snapshots.delete(tag, cascade=cascade, force=force)

    async def compact_snapshot(self, tag: Tag, to: Tag | None = None) -> Snapshot:
        """Write a snapshot so that it needs no other."""
        return await self._links.compact(tag, to)

    async def tidy_snapshots(self, *, dry_run: bool = False) -> tuple[Removed, ...]:
        """Remove what nobody can use."""
        return await self._snapshots.tidy(dry_run=dry_run)

    async def _run(
        self, sandbox: SandboxId, request: LinkRequest
    ) -> AsyncGenerator[Progress, None]:
        """Run the command between two links; tells what it prints."""
        command = request.command or ""
        yield Progress("exec", 0.0, command[:LINE_CHARS_MAX])
        last: list[str] = []
        wanted = ExecRequest(("sh", "-c", command), timeout_s=request.timeout_s)
        async with await self.exec(sandbox, wanted) as session:
            async for event in session:
                match event:
                    case Stdout(data) | Stderr(data):
                        lines = _lines(data)
                        last = [*last, *lines][-LAST_LINES:]
                        for line in lines:
                            yield Progress("exec", None, line)
                    case Exited():
                        _check_exit(event, last)
        yield Progress("exec", 1.0, "done")


def _lines(data: bytes) -> list[str]:
    text = data.decode(errors="replace")
    return [line[:LINE_CHARS_MAX] for line in text.splitlines() if line.strip()]


def _check_exit(ended: Exited, last: list[str]) -> None:
    """Return if a command has done what it was to do.

    Raises:
        BuildError: It has not; its last lines are in the message.
    """
    if ended.exit_code == 0:
        return
    how = f"exited with {ended.exit_code}" if ended.signal is None else f"got signal {ended.signal}"
    if ended.timed_out:
        how = f"was not done after {ended.duration_s:.0f} s"
    raise BuildError(f"the command {how}: {' / '.join(last) or 'it printed nothing'}")
