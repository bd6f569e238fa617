"""The place of a sandbox in its tree: its fork point, its siblings, its parent, its snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.errors import EngineError
from forkd.sdk import _requests
from forkd.sdk._async.contexts import AsyncContexts
from forkd.sdk._async.running import TIMEOUT_MARGIN_S
from forkd.sdk._requests import build
from forkd.wire.v2_trees import BranchCreate, BranchInfo, PromotionInfo, Reset, ResetInfo

if TYPE_CHECKING:
    from forkd.sdk._async.http import AsyncHttp
    from forkd.wire.v2 import SandboxInfo, SnapshotInfo

BRANCH_SECS_PER_CHILD = 1.0
"""Time a branch may take for each sibling; a host without hardware help needs much of it."""

SNAPSHOT_TIMEOUT_S = 3_600.0
"""Time that writing a snapshot may take."""

PROMOTION_TIMEOUT_S = 180.0
"""Time that ending the losers of a promotion and renaming its winner may take."""


class AsyncPlace(AsyncContexts):
    """The part of a sandbox that concerns its tree; `AsyncSandbox` has all of it."""

    async def snapshot(self, tag: str, *, wait: bool = True) -> SnapshotInfo:
        """Write it down under `tag` while it runs; only what differs from its parent is stored.

        Args:
            tag: Name of the snapshot.
            wait: Whether to return when it is ready, or while it is being written.

        Raises:
            Conflict: The tag is taken, or it does not run.
            CapacityError: The disk is full; nothing was left on it.
        """
        made = await self._branch(_requests.branch(0, tag, {}, all_or_nothing=False, wait=wait))
        if made.snapshot is None:
            raise EngineError("the daemon answered without the snapshot")
        return made.snapshot

    async def reset(self, *, deadline_s: float | None = None) -> float:
        """Take it back to where it was forked or branched; return how long, in milliseconds.

        It keeps its id and its address.  What runs in it, and connections to it, end.

        Args:
            deadline_s: Time it has until its agent has answered, in seconds.

        Raises:
            Conflict: It does not run, or the process that held its instant was killed.
        """
        request = build(Reset, deadline_secs=deadline_s)
        done = await self._http.call(
            ResetInfo,
            "POST",
            f"{self._path}/reset",
            body=request,
            timeout_s=request.deadline_secs + TIMEOUT_MARGIN_S,
        )
        return done.reset_ms

    async def promote(self) -> list[str]:
        """Let it take its parent's id, name, address and place; return who ended for that.

        The parent ends, and whatever else was branched from it.  From now on this object is
        the sandbox of that id.

        Raises:
            Conflict: It has no parent, that is gone, or it does not run.
        """
        done = await self._http.call(
            PromotionInfo,
            "POST",
            f"{self._path}/promote",
            timeout_s=PROMOTION_TIMEOUT_S,
        )
        self._become(self._http, done.sandbox)
        return done.ended

    def _become(self, http: AsyncHttp, info: SandboxInfo) -> None:
        """Be the sandbox that `info` describes."""
        raise NotImplementedError

    async def _branch(self, request: BranchCreate) -> BranchInfo:
        n = 0 if request.n is None else request.n
        writing_s = SNAPSHOT_TIMEOUT_S if request.tag and request.wait else 0.0
        return await self._http.call(
            BranchInfo,
            "POST",
            f"{self._path}/branch",
            body=request,
            creates=True,
            timeout_s=request.deadline_secs
            + TIMEOUT_MARGIN_S
            + BRANCH_SECS_PER_CHILD * n
            + writing_s,
        )
