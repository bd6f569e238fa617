"""Tools that run programs and code in a sandbox."""

from __future__ import annotations

import asyncio
import base64
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from forkd import limits
from forkd.errors import NotFound
from forkd.mcp.call import Arguments, Call, Picture, Result, Toolbox, picture_type
from forkd.mcp.fields import Path, SandboxName, TimeoutSecs
from forkd.mcp.output import Output, whole_tail
from forkd.sdk._parallel import AsyncBeside

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forkd.sdk import AsyncProcess, AsyncSandbox
    from forkd.sdk._results import Result as Shown

box = Toolbox()

SIGNAL_EXIT_BASE = 128
"""A program that a signal ended has this plus the signal as exit code, as in a shell."""

REPORT_INTERVAL_S = 1.0
"""How often a client is told how much a program has written."""

EXCERPT_BYTES = 256
"""How much of the end of a file is shown to whoever waits for a text in it."""

READ_BYTES = 1024 * 1024
"""How much of a file is searched at once for a text that is waited for."""

Line = Annotated[str, Field(min_length=1, max_length=limits.EXEC_ARG_BYTES_MAX)]
Args = Annotated[
    list[Annotated[str, Field(max_length=limits.EXEC_ARG_BYTES_MAX)]],
    Field(min_length=1, max_length=limits.EXEC_ARGS_MAX),
]

OUTPUT = (
    "Of long output this has the head and the tail; the file named beside it, in the sandbox, has "
    "all of it."
)


class ExecCommand(Arguments):
    """A program to run."""

    sandbox_id: SandboxName
    args: Line | Args = Field(
        description='A program and its arguments, as ["python3", "-c", "print(2+2)"]; or one '
        'line for the shell, as "ls | wc -l".'
    )
    timeout_secs: TimeoutSecs = Field(
        default=limits.EXEC_TIMEOUT_S_DEFAULT, description="The program is killed after this time."
    )
    cwd: Path | None = Field(default=None, description="Where it starts.")
    env: dict[str, str] = Field(
        default_factory=dict,
        max_length=limits.EXEC_ENV_MAX,
        description="Environment variables added to the sandbox's.",
    )
    user: str | None = Field(
        default=None,
        min_length=1,
        max_length=limits.EXEC_USER_CHARS_MAX,
        description="Who it runs as: a name, or uid[:gid].",
    )
    stdin: str | None = Field(
        default=None, max_length=limits.EXEC_STDIN_CHARS_MAX, description="Its whole input."
    )


class CommandResult(Result):
    """How a program ended, and what it wrote."""

    exit_code: int = Field(description="128 + signal if a signal ended the program.")
    stdout: str = Field(description=OUTPUT)
    stderr: str = Field(description=OUTPUT)
    timed_out: bool = Field(description="It was killed because its time ran out.")
    duration_s: float
    stdout_bytes: int = Field(description="How much it wrote in all.")
    stderr_bytes: int
    stdout_file: str | None = Field(description="Pass this to read_file for the whole output.")
    stderr_file: str | None


@box.tool(ExecCommand, CommandResult, destroys=True)
async def exec_command(call: Call, args: ExecCommand) -> CommandResult:
    """Run a shell command or a program in a sandbox, and return its output and exit code.

    Use this for anything a terminal is for: build, test, install, git, grep, scripts in any
    language. Each command is a process of its own: a `cd` does not last until the next one. For
    Python that remembers, as a notebook does, use eval_code.
    """
    sandbox = await call.sandbox(args.sandbox_id)
    words = ["/bin/sh", "-c", args.args] if isinstance(args.args, str) else args.args
    process = sandbox.exec_stream(
        words,
        stdin=args.stdin is not None,
        timeout_s=args.timeout_secs,
        env=args.env,
        cwd=args.cwd,
        user=args.user,
    )
    given = None if args.stdin is None else args.stdin.encode()
    async with (
        Output(sandbox.files, "stdout") as out,
        Output(sandbox.files, "stderr") as err,
        AsyncBeside() as beside,
        process,
    ):
        if given is not None:
            beside.start(lambda: _feed(process, given))
        await _follow(call, process, out, err)
    ended = await process.wait()
    code = ended.exit_code
    return CommandResult(
        exit_code=SIGNAL_EXIT_BASE + (ended.signal or 0) if code is None else code,
        stdout=out.text(),
        stderr=err.text(),
        timed_out=ended.timed_out,
        duration_s=ended.duration_s,
        stdout_bytes=out.size,
        stderr_bytes=err.size,
        stdout_file=out.file,
        stderr_file=err.file,
    )


async def _feed(process: AsyncProcess, given: bytes) -> None:
    await process.write(given)
    await process.close_stdin()


async def _follow(call: Call, process: AsyncProcess, out: Output, err: Output) -> None:
    """Take what a program writes until it ends; tell the client now and then how much."""
    told = time.monotonic()
    async for piece in process:
        output = out if piece.stream == "stdout" else err
        await output.take(piece.data)
        if time.monotonic() - told >= REPORT_INTERVAL_S:
            told = time.monotonic()
            written = out.size + err.size
            await call.report(written, None, f"the program has written {written} bytes")


class EvalCode(Arguments):
    """Code to run."""

    sandbox_id: SandboxName
    code: str = Field(
        max_length=limits.EVAL_CODE_BYTES_MAX,
        description="Python statements; a last expression is the result.",
    )
    timeout_secs: TimeoutSecs = Field(
        default=limits.EXEC_TIMEOUT_S_DEFAULT,
        description="The code is interrupted after this time; variables are kept.",
    )


class CodeResult(Result):
    """What code gave."""

    result: str | None = Field(description="The repr of the last expression, if there was one.")
    stdout: str = Field(description=OUTPUT)
    stderr: str = Field(description=OUTPUT)
    error: str | None = Field(description="The exception that the code raised, if it raised one.")
    traceback: str | None
    exit_code: int = Field(description="0, or 1 if the code raised or ran out of time.")
    timed_out: bool
    pictures: int = Field(description="How many pictures are shown beside this, such as charts.")
    stdout_file: str | None = Field(description="Pass this to read_file for the whole output.")
    stderr_file: str | None


@box.tool(EvalCode, CodeResult, destroys=True)
async def eval_code(call: Call, args: EvalCode) -> CodeResult:
    """Run Python code in a sandbox's warm interpreter, and return its result and output.

    Variables, imports and functions last from one call to the next, as in a notebook, and what
    the snapshot has imported is there already. Figures of matplotlib are shown as pictures. Use
    this to compute, and to work with data. For other languages and commands, use exec_command.
    """
    sandbox = await call.sandbox(args.sandbox_id)
    said = await sandbox.eval(args.code, check=False, timeout_s=args.timeout_secs)
    result, result_cut = _cut(said.repr)
    async with AsyncExitStack() as stack:
        out = await stack.enter_async_context(Output(sandbox.files, "stdout"))
        err = await stack.enter_async_context(Output(sandbox.files, "stderr"))
        await out.take(said.stdout.encode())
        await err.take(said.stderr.encode())
    error = None if said.error is None else f"{said.error.type}: {said.error.message}"
    if said.timed_out:
        error = f"timed out after {args.timeout_secs:g} s; variables that were set are kept"
    pictures = tuple(_pictures(said.results))
    return CodeResult(
        result=result if not result_cut else f"{result} [... cut; print a part of it ...]",
        stdout=out.text(),
        stderr=err.text(),
        error=None if error is None else _cut(error)[0],
        traceback=None if said.error is None else _cut(said.error.traceback)[0],
        exit_code=0 if error is None else 1,
        timed_out=said.timed_out,
        pictures=len(pictures),
        stdout_file=out.file,
        stderr_file=err.file,
    ).with_pictures(*pictures)


def _pictures(results: Sequence[Shown]) -> Iterator[Picture]:
    """Yield what code has shown as pictures; what is no picture, whatever it says, is none."""
    for each in results:
        for text, kind in ((each.png, "image/png"), (each.jpeg, "image/jpeg")):
            with suppress(ValueError):
                data = base64.b64decode(text or "", validate=True)
                if picture_type(data) == kind:
                    yield Picture(data, kind)
                    break


def _cut(text: str | None) -> tuple[str | None, bool]:
    """Return a text as long as an answer may have it, and whether it was longer."""
    if text is None or len(text) <= limits.MCP_OUTPUT_BYTES_MAX:
        return text, False
    return text[: limits.MCP_OUTPUT_BYTES_MAX], True


class PingSandbox(Arguments):
    """The sandbox to ask."""

    sandbox_id: SandboxName


class Pong(Result):
    """How the agent in a sandbox is."""

    pong: Literal[True] = True
    pid: int
    uptime_s: float
    runtime: Literal["none", "starting", "ready", "failed"] = Field(
        description="The warm interpreter of eval_code."
    )
    warmup_ready: bool


@box.tool(PingSandbox, Pong, reads=True)
async def ping_sandbox(call: Call, args: PingSandbox) -> Pong:
    """Check that a sandbox answers, and whether its warm interpreter is ready."""
    said = await (await call.sandbox(args.sandbox_id)).ping()
    return Pong(
        pid=said.pid, uptime_s=said.uptime_s, runtime=said.runtime, warmup_ready=said.warmup_ready
    )


class WaitForText(Arguments):
    """A text to wait for."""

    sandbox_id: SandboxName
    path: Path = Field(description="The file, such as a log, inside the sandbox.")
    marker: str = Field(
        min_length=1, max_length=limits.MCP_MARKER_CHARS_MAX, description="The text to wait for."
    )
    timeout_secs: float = Field(
        default=60, ge=0, le=limits.MCP_WAIT_S_MAX, description="How long to wait at most."
    )
    poll_interval_ms: int = Field(
        default=200, ge=10, le=60_000, description="How often the file is looked at."
    )


class Waited(Result):
    """Whether a text came."""

    found: bool
    elapsed_ms: int
    last_excerpt: str = Field(description="The end of the file.")


@box.tool(WaitForText, Waited, reads=True)
async def wait_for_text(call: Call, args: WaitForText) -> Waited:
    """Wait until a file in a sandbox contains a text, such as READY in a log of a server.

    A file that does not exist yet is waited for, too.
    """
    sandbox = await call.sandbox(args.sandbox_id)
    began = time.monotonic()
    search = _Search(sandbox, args.path, args.marker.encode())
    while True:
        found = await search.more()
        elapsed_s = time.monotonic() - began
        if found or elapsed_s >= args.timeout_secs:
            excerpt = whole_tail(bytes(search.end[-EXCERPT_BYTES:])).decode(errors="replace")
            return Waited(found=found, elapsed_ms=int(elapsed_s * 1000), last_excerpt=excerpt)
        await call.report(elapsed_s, args.timeout_secs, f"waiting for {args.marker[:100]!r}")
        await asyncio.sleep(min(args.poll_interval_ms / 1000, args.timeout_secs - elapsed_s))


class _Search:
    """Looks for a text in a file that grows, in each part once."""

    def __init__(self, sandbox: AsyncSandbox, path: str, marker: bytes) -> None:
        self._sandbox = sandbox
        self._path = path
        self._marker = marker
        self._offset = 0
        self.end = bytearray()

    async def more(self) -> bool:
        """Read what was added since, and return whether the text is in it."""
        try:
            size = (await self._sandbox.files.stat(self._path)).size_bytes
            if size < self._offset:
                self._offset, self.end = 0, bytearray()  # another file is there now
            while True:
                piece = await self._read()
                self.end += piece
                if self._marker in self.end:
                    return True
                del self.end[: -max(EXCERPT_BYTES, len(self._marker))]
                if len(piece) < READ_BYTES:
                    return False
        except NotFound as error:
            if "guest_code" not in error.context:  # it is the sandbox that does not exist
                raise
            return False

    async def _read(self) -> bytes:
        files = self._sandbox.files
        async with files.open(self._path, offset=self._offset, length=READ_BYTES) as pieces:
            found = b"".join([piece async for piece in pieces])
        self._offset += len(found)
        return found
