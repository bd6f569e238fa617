"""A sandbox: run programs and code in it, read and write its files, end it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from forkd.errors import NotFound
from forkd.sdk._async.files import AsyncFiles
from forkd.sdk._async.process import AsyncProcess
from forkd.sdk._requests import build, program
from forkd.sdk._results import eval_result
from forkd.wire import v1
from forkd.wire.limits import TIMEOUT_SECS_DEFAULT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType
    from typing import Unpack

    from forkd.sdk._async.http import AsyncHttp
    from forkd.sdk._requests import ExecOptions
    from forkd.sdk._results import EvalResult

TIMEOUT_MARGIN_S = 60.0
"""Time the daemon has beyond a program's own timeout, so that it, not we, says that it ran out."""


class AsyncSandbox:
    """One sandbox.  As a context manager it is killed at the end.

    Attributes:
        info: The sandbox as the daemon last described it; `refresh` asks again.
        files: Its file system.
    """

    def __init__(self, http: AsyncHttp, info: v1.SandboxInfo) -> None:
        self._http = http
        self._path = f"/v1/sandboxes/{http.quoted(info.id)}"
        self.info = info
        self.files = AsyncFiles(http, self._path)

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

    async def refresh(self) -> v1.SandboxInfo:
        """Ask the daemon how the sandbox is, and return that."""
        self.info = await self._http.call(v1.SandboxInfo, "GET", self._path)
        return self.info

    async def kill(self) -> None:
        """End the sandbox and remove everything that was its own."""
        await self._http.send("DELETE", self._path)

    async def ping(self) -> v1.Pong:
        """Ask the agent in the guest how it is."""
        return await self._http.call(v1.Pong, "POST", f"{self._path}/ping")

    async def eval(self, code: str, *, timeout_s: float = TIMEOUT_SECS_DEFAULT) -> EvalResult:
        """Run code in the warm runtime, which keeps its names from one call to the next.

        An exception that the code raises is in the result; `result.check()` raises it.
        """
        request = build(v1.Eval, code=code, timeout_secs=timeout_s)
        answer = await self._http.call(
            v1.EvalResult,
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
        timeout_s: float = TIMEOUT_SECS_DEFAULT,
        **options: Unpack[ExecOptions],
    ) -> v1.ExecResult:
        """Run a program, wait for it, and return what it wrote and its exit code.

        No shell reads `args`.  Output is kept to 8 MiB of each stream, see `truncated`; a
        program that writes more, reads long input or is watched as it runs needs `exec_stream`.

        Raises:
            GuestError: There is no such program, user or folder.
        """
        request = build(v1.Exec, args=program(args), stdin=stdin, timeout_secs=timeout_s, **options)
        return await self._http.call(
            v1.ExecResult,
            "POST",
            f"{self._path}/exec",
            body=request,
            timeout_s=timeout_s + TIMEOUT_MARGIN_S,
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
            timeout_s: It is killed after this time.
            options: As for `exec`.
        """
        size = None if tty is None else build(v1.TerminalSize, rows=tty[0], columns=tty[1])
        request = build(
            v1.ExecStart,
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
