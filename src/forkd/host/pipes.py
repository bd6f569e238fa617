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
import subprocess
from typing import TYPE_CHECKING, Protocol

from forkd.errors import CapacityError, HostError
from forkd.host.faults import kernel_call
from forkd.host.process import dying_with_us, plain_environment
from forkd.host.spawn import Process

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
    from pathlib import Path
    from typing import IO

    from forkd.host.rlimits import Limits

PIECE_BYTES = 256 * 1024

STDERR_BYTES_MAX = 64 * 1024
"""Most that is kept of what such a program says is wrong: what fits into a pipe."""

END_TIMEOUT_S = 30.0
"""How long the kernel may take to end such a program."""


class Piped(Protocol):
    """A program that runs; each method raises `HostError` for what the kernel refuses."""

    async def feed(self, pieces: AsyncIterable[bytes]) -> None:
        """Send every piece and then the end; what it does not want to read is dropped."""
        ...

    def output(self) -> AsyncGenerator[bytes, None]:
        """Yield what it writes, until it closes its output."""
        ...

    async def ended(self) -> tuple[int, bytes]:
        """Wait for its end; return its status and what it said was wrong.  Read `output` first."""
        ...


@contextlib.asynccontextmanager
async def piped(
    args: Sequence[str | Path], *env: str, limits: Limits, descriptors: Sequence[int] = ()
) -> AsyncIterator[Piped]:
    """Run a program for as long as the block lasts.

    Args:
        args: The program and its arguments; no shell is involved.
        env: Names of variables that it gets besides `plain_environment`.
        limits: What it may take of the host.
        descriptors: What it has open, of what we have, under the same numbers.

    Raises:
        CapacityError: There are too many processes or open files, or too little memory.
        HostError: It cannot be started.
    """
    command = limits.command([*dying_with_us(), *args])
    with kernel_call(f"start {args[0]}"):
        started = subprocess.Popen(  # noqa: ASYNC220, S603 - it does not block; callers pass lists
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=plain_environment(*env),
            umask=limits.umask,
            start_new_session=True,
            bufsize=0,
            pass_fds=descriptors,
        )
    running = _Running(started)
    try:
        await running.connect()
        yield running
    finally:
        ending = asyncio.ensure_future(running.end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise


class _Running:
    """A program between its start and its end.

    The event loop's own subprocesses start a thread each to wait for them; a pidfd needs none.
    """

    def __init__(self, started: subprocess.Popen[bytes]) -> None:
        assert started.stdin is not None  # noqa: S101 - we asked for pipes
        assert started.stdout is not None  # noqa: S101
        assert started.stderr is not None  # noqa: S101
        self._started = started
        self._input, self._output, self._errors = started.stdin, started.stdout, started.stderr
        self._stdout, self._stderr = asyncio.StreamReader(), asyncio.StreamReader()
        self._stdin: asyncio.StreamWriter | None = None
        self._process: Process | None = None
        self._open = contextlib.ExitStack()

    async def connect(self) -> None:
        """Have the event loop read, write and watch it."""
        loop = asyncio.get_running_loop()
        with kernel_call("watch a program"):
            self._process = self._open.enter_context(
                Process(self._started.pid, os.pidfd_open(self._started.pid))
            )
            for reader, pipe in ((self._stdout, self._output), (self._stderr, self._errors)):
                await self._read(reader, pipe)
            transport, protocol = await loop.connect_write_pipe(
                lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), self._input
            )
            self._open.callback(_abort, transport)
            self._stdin = asyncio.StreamWriter(transport, protocol, None, loop)

    async def _read(self, reader: asyncio.StreamReader, pipe: IO[bytes]) -> None:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        self._open.callback(transport.close)

    async def feed(self, pieces: AsyncIterable[bytes]) -> None:
        """See `Piped`."""
        if self._stdin is None:
            raise HostError("a program that is not connected cannot be fed")
        wanted = True
        async for piece in pieces:
            wanted = wanted and await self._send(self._stdin, piece)
        with kernel_call("end the input of a program"), contextlib.suppress(ConnectionError):
            self._stdin.close()
            await self._stdin.wait_closed()

    async def _send(self, stdin: asyncio.StreamWriter, piece: bytes) -> bool:
        """Return whether the program took a piece."""
        with kernel_call("write to a program"):
            try:
                stdin.write(piece)
                await stdin.drain()
            except ConnectionError:
                return False
        return True

    async def output(self) -> AsyncGenerator[bytes, None]:
        """See `Piped`."""
        while piece := await _piece(self._stdout):
            yield piece

    async def ended(self) -> tuple[int, bytes]:
        """See `Piped`."""
        said = b""
        while piece := await _piece(self._stderr):
            said = (said + piece)[-STDERR_BYTES_MAX:]
        return await self._wait(), said

    async def end(self) -> None:
        """Kill what is left of it, and let go of its pipes."""
        try:
            with kernel_call("end a program"), contextlib.suppress(ProcessLookupError):
                os.killpg(self._started.pid, signal.SIGKILL)
            try:
                await self._wait()
            except CapacityError:  # it is killed, and can only not be watched
                await asyncio.to_thread(self._started.wait)
        finally:
            self._open.close()
            for pipe in (self._input, self._output, self._errors):
                pipe.close()

    async def _wait(self) -> int:
        """Return its status when it has ended, and is reaped."""
        if self._process is None:
            raise CapacityError("a program that is not watched cannot be waited for")
        if self._process.status is None and not await self._process.wait(END_TIMEOUT_S):
            raise HostError(f"process {self._started.pid} does not end")
        # Told how it has ended, Popen neither waits nor warns.
        self._started.returncode = -1 if self._process.status is None else self._process.status
        return self._started.returncode


def _abort(writing: asyncio.WriteTransport) -> None:
    """Close a pipe, whatever it has not sent; one that has is closed already."""
    if writing.get_write_buffer_size() or not writing.is_closing():
        writing.abort()


async def _piece(reader: asyncio.StreamReader) -> bytes:
    with kernel_call("read from a program"):
        return await reader.read(PIECE_BYTES)
