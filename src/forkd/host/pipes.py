"""Run a program that reads what we send it and writes what we pass on, without holding it.

`host.process.run` is for programs whose output is a result.  Here the bytes are the result and
may be more than memory, so they flow through the event loop piece by piece.  The rules are the
same: the program has an environment of its own, and when the block ends, so has the program
and whatever it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING

from forkd.host.faults import kernel_call
from forkd.host.process import dying_with_us, plain_environment

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
    from pathlib import Path

PIECE_BYTES = 256 * 1024

STDERR_BYTES_MAX = 64 * 1024
"""Most that is kept of what such a program says is wrong: what fits into a pipe."""


class Piped:
    """A program that runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None  # noqa: S101 - we asked for pipes
        assert process.stdout is not None  # noqa: S101
        assert process.stderr is not None  # noqa: S101
        self._process = process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr

    async def feed(self, pieces: AsyncIterable[bytes]) -> None:
        """Send every piece and then the end; what it does not want to read is dropped."""
        wanted = True
        async for piece in pieces:
            if wanted:
                wanted = await self._send(piece)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._stdin.close()
            await self._stdin.wait_closed()

    async def _send(self, piece: bytes) -> bool:
        """Return whether the program took a piece."""
        try:
            self._stdin.write(piece)
            await self._stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    async def output(self) -> AsyncGenerator[bytes, None]:
        """Yield what it writes, until it closes its output."""
        while piece := await self._stdout.read(PIECE_BYTES):
            yield piece

    async def ended(self) -> tuple[int, bytes]:
        """Wait for its end; return its status and what it said was wrong.  Read `output` first."""
        said = b""
        while piece := await self._stderr.read(PIECE_BYTES):
            said = (said + piece)[-STDERR_BYTES_MAX:]
        return await self._process.wait(), said

    async def end(self) -> None:
        """Kill what is left of it and let go of its pipes."""
        with contextlib.suppress(ProcessLookupError):  # it ended, and left nobody
            os.killpg(self._process.pid, signal.SIGKILL)
        self._stdin.close()
        for stream in (self._stdout, self._stderr):
            while await stream.read(PIECE_BYTES):
                pass
        await self._process.wait()


@contextlib.asynccontextmanager
async def piped(args: Sequence[str | Path], *env: str) -> AsyncIterator[Piped]:
    """Run a program for as long as the block lasts.

    Args:
        args: The program and its arguments; no shell is involved.
        env: Names of variables that it gets besides `plain_environment`.

    Raises:
        HostError: It cannot be started.
    """
    with kernel_call(f"start {args[0]}"):
        process = await asyncio.create_subprocess_exec(
            *dying_with_us(),
            *map(str, args),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=plain_environment(*env),
            start_new_session=True,
        )
    running = Piped(process)
    try:
        yield running
    finally:
        ending = asyncio.ensure_future(running.end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise
