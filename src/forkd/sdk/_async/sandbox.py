"""A sandbox: run programs and code in it, read and write its files, end it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from forkd.errors import EngineError, NotFound
from forkd.limits import EXEC_TIMEOUT_S_DEFAULT
from forkd.sdk import _requests
from forkd.sdk._async.files import AsyncFiles
from forkd.sdk._async.network import AsyncNetwork
from forkd.sdk._async.process import AsyncProcess
from forkd.sdk._requests import build, program
from forkd.sdk._results import Branch, eval_result
from forkd.wire import v2, v2_events, v2_trees

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType
    from typing import Unpack

    from forkd.sdk._async.http import AsyncHttp
    from forkd.sdk._requests import BranchOptions, ExecOptions, LimitOptions
    from forkd.sdk._results import EvalResult

FORK_SECS_PER_CHILD = 1.0
"""Time a fork may take for each of its children; a host without hardware help needs much of it."""

SNAPSHOT_TIMEOUT_S = 3_600.0
"""Time that writing a snapshot may take."""

PROMOTION_TIMEOUT_S = 180.0
"""Time that ending the losers of a promotion and renaming its winner may take."""

TIMEOUT_MARGIN_S = 60.0
"""Time the daemon has beyond a program's own timeout, so that it, not we, says that it ran out."""


class AsyncSandbox:
    """One sandbox.  As a context manager it is killed at the end.

    Attributes:
        info: The sandbox as the daemon last described it; `refresh` asks again.
        files: Its file system.
        network: What it may reach.
    """

    def __init__(self, http: AsyncHttp, info: v2.SandboxInfo) -> None:
        self._http = http
        self._path: str
        self._become(info)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.tag}>"

    @property
    def id(self) -> str:
        """Its name."""
        return self.info.id

    @property
    def tag(self) -> str:
        """The snapshot it was forked from."""
        return self.info.snapshot_tag

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.kill()
        except NotFound:
            return

    async def refresh(self) -> v2.SandboxInfo:
        """Ask the daemon how the sandbox is, and return that."""
        self.info = await self._http.call(v2.SandboxInfo, "GET", self._path)
        return self.info

    async def kill(self) -> None:
        """End the sandbox and remove everything that was its own."""
        await self._http.send("DELETE", self._path)

    async def branch(self, n: int = 1, **options: Unpack[BranchOptions]) -> list[AsyncSandbox]:
        """Branch it into `n` siblings while it runs: all of them, or an error and none.

        They have what it had at one instant, and go on from there; it is paused for some
        milliseconds, and goes on, too.

        Raises:
            BudgetError: Its tree may not grow so much.
            Conflict: It does not run.
            EngineError: At least one did not become ready.
        """
        made = await self._branch(_requests.branch(n, None, options, all_or_nothing=True))
        return self._siblings(made)

    async def try_branch(
        self,
        n: int = 1,
        *,
        tag: str | None = None,
        wait: bool = True,
        **options: Unpack[BranchOptions],
    ) -> Branch[AsyncSandbox]:
        """Branch it into up to `n` siblings, and write the same instant down under `tag`.

        Args:
            n: How many siblings; 0 only with a tag.
            tag: Name of the snapshot; None for none.
            wait: Whether to return when the snapshot is ready, or while it is being written.
            options: As for `branch`.

        Raises:
            EngineError: Not one became ready, and there is no tag.
        """
        request = _requests.branch(n, tag, options, all_or_nothing=False, wait=wait)
        made = await self._branch(request)
        failures = [each for each in made.sandboxes if isinstance(each, v2.SandboxFailure)]
        siblings = self._siblings(made)
        return Branch(siblings, failures, made.pause_ms, made.stall_ms, made.snapshot)

    async def snapshot(self, tag: str, *, wait: bool = True) -> v2.SnapshotInfo:
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

        Raises:
            Conflict: It does not run, or the process that held its instant was killed.
        """
        request = build(v2_trees.Reset, deadline_secs=deadline_s)
        done = await self._http.call(
            v2_trees.ResetInfo,
            "POST",
            f"{self._path}/reset",
            body=request,
            timeout_s=request.deadline_secs + TIMEOUT_MARGIN_S,
        )
        return done.reset_ms

    async def set_limits(self, **limits: Unpack[LimitOptions]) -> v2.SandboxInfo:
        """Change what it may take of the host, at once; return it as it is then.

        Raises:
            InvalidRequest: No limit is given.
            Conflict: It does not run, has no cgroup, has no network whose bandwidth could be
                limited, or has more memory in use than that.
            HostError: The daemon's host cannot limit disk I/O.
        """
        request = build(v2.LimitsPatch, **limits)
        self.info = await self._http.call(
            v2.SandboxInfo, "PATCH", f"{self._path}/limits", body=request
        )
        return self.info

    async def promote(self) -> list[str]:
        """Let it take its parent's id, name, address and place; return who ended for that.

        The parent ends, and whatever else was branched from it.  From now on this object is
        the sandbox of that id.

        Raises:
            Conflict: It has no parent, that is gone, or it does not run.
        """
        done = await self._http.call(
            v2_trees.PromotionInfo,
            "POST",
            f"{self._path}/promote",
            timeout_s=PROMOTION_TIMEOUT_S,
        )
        self._become(done.sandbox)
        return done.ended

    async def _branch(self, request: v2_trees.BranchCreate) -> v2_trees.BranchInfo:
        n = 0 if request.n is None else request.n
        writing_s = SNAPSHOT_TIMEOUT_S if request.tag and request.wait else 0.0
        return await self._http.call(
            v2_trees.BranchInfo,
            "POST",
            f"{self._path}/branch",
            body=request,
            timeout_s=request.deadline_secs
            + TIMEOUT_MARGIN_S
            + FORK_SECS_PER_CHILD * n
            + writing_s,
        )

    def _siblings(self, made: v2_trees.BranchInfo) -> list[AsyncSandbox]:
        ready = (each for each in made.sandboxes if isinstance(each, v2.SandboxInfo))
        return [AsyncSandbox(self._http, each) for each in ready]

    def _become(self, info: v2.SandboxInfo) -> None:
        self.info = info
        self._path = f"/v2/sandboxes/{self._http.quoted(info.id)}"
        self.files = AsyncFiles(self._http, self._path)
        self.network = AsyncNetwork(self._http, self._path)

    async def ping(self) -> v2.Pong:
        """Ask the agent in the guest how it is."""
        return await self._http.call(v2.Pong, "POST", f"{self._path}/ping")

    async def usage(self) -> v2_events.UsageInfo:
        """Return what it uses of the host: CPU time, memory, disk, network.

        Raises:
            Conflict: It does not run.
        """
        return await self._http.call(v2_events.UsageInfo, "GET", f"{self._path}/usage")

    async def eval(self, code: str, *, timeout_s: float = EXEC_TIMEOUT_S_DEFAULT) -> EvalResult:
        """Run code in the warm runtime, which keeps its names from one call to the next.

        An exception that the code raises is in the result; `result.check()` raises it.
        """
        request = build(v2.Eval, code=code, timeout_secs=timeout_s)
        answer = await self._http.call(
            v2.EvalResult,
            "POST",
            f"{self._path}/eval",
            body=request,
            timeout_s=timeout_s + TIMEOUT_MARGIN_S,
        )
        return eval_result(answer)

    async def exec(
        self,
        args: Sequence[str],
        *,
        stdin: str | None = None,
        timeout_s: float | None = EXEC_TIMEOUT_S_DEFAULT,
        **options: Unpack[ExecOptions],
    ) -> v2.ExecResult:
        """Run a program, wait for it, and return what it wrote and its exit code.

        No shell reads `args`.  Output is kept to 8 MiB of each stream, see `truncated`; a
        program that writes more, reads long input or is watched as it runs needs `exec_stream`.
        A program that it leaves in the background lives on; what that writes later is dropped.

        Args:
            args: The program and its arguments.
            stdin: Its whole input.
            timeout_s: Kill it after this time; None: never.
            options: Its environment, directory and user.

        Raises:
            NotFound: There is no such program; `context["program"]` names it.
            InvalidRequest: There is no such user or folder.
            GuestError: The program cannot be executed.
        """
        request = build(v2.Exec, args=program(args), stdin=stdin, timeout_secs=timeout_s, **options)
        if timeout_s is None:
            request = request.model_copy(update={"timeout_secs": None})  # not the default
        return await self._http.call(
            v2.ExecResult,
            "POST",
            f"{self._path}/exec",
            body=request,
            timeout_s=None if timeout_s is None else timeout_s + TIMEOUT_MARGIN_S,
        )

    def exec_stream(
        self,
        args: Sequence[str],
        *,
        stdin: bool = False,
        tty: tuple[int, int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[ExecOptions],
    ) -> AsyncProcess:
        """Return a program with its streams attached, which starts when it is entered.

        Args:
            args: The program and its arguments.
            stdin: Whether it will be written to; else its standard input is /dev/null.
            tty: Rows and columns of the terminal it gets; None for pipes.
            timeout_s: Kill it after this time; None: never.
            options: As for `exec`.
        """
        size = None if tty is None else build(v2.TerminalSize, rows=tty[0], columns=tty[1])
        request = build(
            v2.ExecStart,
            args=program(args),
            stdin=stdin,
            tty=size,
            timeout_secs=timeout_s,
            **options,
        )
        return AsyncProcess(self._http, f"{self._path}/exec/stream", request)

    async def logs(self) -> bytes:
        """Return the end of what the guest wrote to its console, at most 1 MiB."""
        async with self._http.streamed(f"{self._path}/logs") as answer:
            return await answer.aread()

    async def follow_logs(self) -> AsyncIterator[bytes]:
        """Yield the console's log so far, then what is added, until the sandbox ends."""
        async with self._http.streamed(f"{self._path}/logs", {"follow": True}) as answer:
            async for piece in answer.aiter_bytes():
                yield piece
