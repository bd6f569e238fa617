"""Extend chains by a link, of a running sandbox or of a fork that ran a command; compact them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.model.caller import Scope
from forkd.model.exec import ExecRequest, Exited, Stderr, Stdout
from forkd.model.ids import SandboxId, Tag
from forkd.model.progress import Progress
from forkd.model.sandbox import ForkOptions
from forkd.service.supervision import to_end
from forkd.service.use_case import streaming_use_case

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from forkd.model.caller import Caller
    from forkd.model.snapshot import LinkRequest, Snapshot
    from forkd.service.guests import Guests
    from forkd.service.sandboxes.component import Sandboxes
    from forkd.service.snapshots.catalog import Catalog
    from forkd.service.snapshots.compaction import Compaction
    from forkd.service.trees.branches import Branches
    from forkd.telemetry.telemetry import Telemetry

LINE_CHARS_MAX = 200
"""How much of a line that a command prints is shown as progress."""

LAST_LINES = 5
"""How many of them go into the error of a command that failed."""


@dataclass(frozen=True, slots=True)
class Chains:
    """The chains of one host; `forkd.service.api.Chains` documents what a caller may ask."""

    telemetry: Telemetry
    catalog: Catalog
    sandboxes: Sandboxes
    branches: Branches
    guests: Guests
    compaction: Compaction

    async def compact(self, caller: Caller, tag: Tag, to: Tag | None = None) -> Snapshot:
        """Write a snapshot so that it needs no other."""
        return await self.compaction.compact(caller, tag, to)

    @streaming_use_case("extend", Scope.SNAPSHOTS, Scope.RUN)
    async def extend(
        self, caller: Caller, request: LinkRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Take a durable snapshot of a sandbox, or of a fork in which a command has run."""
        if request.of_sandbox:
            sandbox = SandboxId(request.source)
            yield Progress("branch", None, f"branching {sandbox}")
            yield await self.branches.snapshot(caller, sandbox, request.tag, wait=request.wait)
            return
        parent = Tag(request.source)
        self.catalog.look_up(caller, parent)
        self.catalog.check_claim(request.tag, parent)
        yield Progress("fork", None, f"forking {parent}")
        options = ForkOptions(network=request.network, all_or_nothing=True, die_with_daemon=True)
        (fork,) = (await self.sandboxes.fork(caller, parent, 1, options)).sandboxes
        try:
            async with contextlib.aclosing(self._run(caller, fork.id, request)) as steps:
                async for step in steps:
                    yield step
            yield Progress("save", None, f"writing what differs from {parent}")
            made = await self.branches.snapshot(caller, fork.id, request.tag, wait=request.wait)
        finally:
            await to_end(self.sandboxes.delete_all([fork.id]))
        yield made

    async def _run(
        self, caller: Caller, sandbox: SandboxId, request: LinkRequest
    ) -> AsyncGenerator[Progress, None]:
        """Run the command between two links; yields what it prints.

        Raises:
            BuildError: It failed; its last lines are in the message.
        """
        command = request.command or ""
        yield Progress("exec", 0.0, command[:LINE_CHARS_MAX])
        last: list[str] = []
        wanted = ExecRequest(("sh", "-c", command), timeout_s=request.timeout_s)
        async with await self.guests.exec(caller, sandbox, wanted) as session:
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
    """Return if a command has succeeded.

    Raises:
        BuildError: It has not; its last lines are in the message.
    """
    if ended.exit_code == 0:
        return
    how = f"exited with {ended.exit_code}" if ended.signal is None else f"got signal {ended.signal}"
    if ended.timed_out:
        how = f"was not done after {ended.duration_s:.0f} s"
    raise BuildError(f"the command {how}: {' / '.join(last) or 'it printed nothing'}")
