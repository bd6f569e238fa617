"""Running a program to its end: over one request, or attached to it."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forkd.limits import EXEC_OUTPUT_BYTES_MAX, EXEC_STDIN_CHARS_MAX
from forkd.sdk._async.process import AsyncProcess
from forkd.sdk._parallel import AsyncBeside, async_told
from forkd.sdk._requests import build
from forkd.sdk._results import SIGNAL_EXIT_BASE, ExecResult, exec_result, judged
from forkd.wire import v2

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.sdk._async.http import AsyncHttp
    from forkd.sdk._requests import ExecOptions

TIMEOUT_MARGIN_S = 60.0
"""Time the daemon has beyond a program's own timeout, so that it, not we, says that it ran out."""


@dataclass(frozen=True, slots=True)
class Run:
    """A program that is to run to its end, as the callers of `exec` and `run` describe it."""

    args: list[str]
    options: ExecOptions
    timeout_s: float | None
    stdin: str | bytes | None
    on_stdout: Callable[[Any], object] | None
    on_stderr: Callable[[Any], object] | None
    check: bool | None
    text: bool

    async def to_the_end(self, http: AsyncHttp, path: str) -> ExecResult[Any]:
        """Run it in the sandbox at `path`.

        Raises:
            ExecTimeout: Its time ran out, unless `check` is false.
            CommandError: It exited with another code than 0, and `check` is true.
        """
        stdin = self.stdin
        short = stdin is None or (isinstance(stdin, str) and len(stdin) <= EXEC_STDIN_CHARS_MAX)
        if self.text and short and self.on_stdout is None and self.on_stderr is None:
            result = await self._buffered(http, path)
        else:
            result = await self._attached(http, path)
        return judged(result, check=self.check)

    async def _buffered(self, http: AsyncHttp, path: str) -> ExecResult[str]:
        """Have the daemon keep what the program writes."""
        limit_s = self.timeout_s
        request = build(
            v2.Exec, args=self.args, stdin=self.stdin, timeout_secs=limit_s, **self.options
        )
        if limit_s is None:
            request = request.model_copy(update={"timeout_secs": None})  # not the default
        answer = await http.call(
            v2.ExecResult,
            "POST",
            f"{path}/exec",
            body=request,
            timeout_s=None if limit_s is None else limit_s + TIMEOUT_MARGIN_S,
        )
        return exec_result(answer, self.args)

    async def _attached(self, http: AsyncHttp, path: str) -> ExecResult[Any]:
        """Take what the program writes as it comes."""
        given = self.stdin.encode() if isinstance(self.stdin, str) else self.stdin
        kept = {
            "stdout": Kept(self.on_stdout, text=self.text),
            "stderr": Kept(self.on_stderr, text=self.text),
        }
        request = build(
            v2.ExecStart,
            args=self.args,
            stdin=given is not None,
            timeout_secs=self.timeout_s,
            **self.options,
        )
        process = AsyncProcess(http, f"{path}/exec/stream", request)

        async def feed() -> None:
            await process.write(given or b"")
            await process.close_stdin()

        async with AsyncBeside() as beside, process:
            if given is not None:
                beside.start(feed)
            async for output in process:
                await kept[output.stream].take(output.data)
            for each in kept.values():
                await each.take(b"", last=True)
        ended = await process.wait()
        stdout, stderr = kept.values()
        code = ended.exit_code
        return ExecResult(
            exit_code=SIGNAL_EXIT_BASE + (ended.signal or 0) if code is None else code,
            stdout=stdout.output(),
            stderr=stderr.output(),
            signal=ended.signal,
            timed_out=ended.timed_out,
            duration_s=ended.duration_s,
            truncated=ended.truncated or stdout.truncated or stderr.truncated,
            args=tuple(self.args),
        )


class Kept:
    """One output of a program: its first bytes, and a function that is told all of it."""

    def __init__(
        self,
        callback: Callable[[Any], object] | None,
        *,
        text: bool = True,
        bytes_max: int = EXEC_OUTPUT_BYTES_MAX,
    ) -> None:
        self._callback = callback
        self._bytes_max = bytes_max
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace") if text else None
        self._data = bytearray()
        self.truncated = False

    async def take(self, data: bytes, *, last: bool = False) -> None:
        """Keep what there is room for, and tell all of it."""
        room = self._bytes_max - len(self._data)
        self._data += data[:room]
        self.truncated = self.truncated or len(data) > room
        if self._callback is None:
            return
        piece = data if self._decoder is None else self._decoder.decode(data, last)
        if piece:
            await async_told(self._callback, piece)

    def output(self) -> Any:  # noqa: ANN401 - text or bytes
        """Return what was kept."""
        if self._decoder is None:
            return bytes(self._data)
        return self._data.decode(errors="replace")
