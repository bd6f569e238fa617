"""Start programs that outlive us, and watch processes that are not our children.

`host.process.run` is for programs that we wait for.  A VMM process is the
opposite: it gets a session of its own, keeps nothing of ours, and lives on when
the daemon ends.  What we hold is a `Process`: a pidfd, which cannot come to
mean another process as a pid can.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Self

from forkd.errors import HostError
from forkd.host.faults import kernel_call
from forkd.host.process import plain_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from forkd.host.rlimits import Limits


class Process:
    """A process, held by its pidfd; close it, or leave its `with` block, to let go.

    Attributes:
        pid: Its number.
        status: How it ended, once `wait` has seen that, if it was a child of ours: its exit status,
            or the number of the signal, negative.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.status: int | None = None
        self._pidfd = pidfd
        self._watching: asyncio.AbstractEventLoop | None = None

    @classmethod
    def open(cls, pid: int) -> Self | None:
        """Return the process that `pid` means now; None if there is none.

        Raises:
            CapacityError: There are too many open files.
            HostError: The kernel gives out no pidfds.
        """
        with kernel_call(f"open process {pid}", pid=pid):
            try:
                return cls(pid, os.pidfd_open(pid))
            except ProcessLookupError:
                return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the process; idempotent."""
        self._unwatch()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called once by the event loop when the process has ended.

        Cheap: a descriptor and no task, so that it can be done for ten thousand.

        Raises:
            CapacityError: The kernel has no room to watch another descriptor.
        """

        def ended() -> None:
            self._unwatch()
            on_end()

        loop = asyncio.get_running_loop()
        with kernel_call(f"watch process {self.pid}", pid=self.pid):
            loop.add_reader(self._pidfd, ended)
        self._watching = loop

    def _unwatch(self) -> None:
        if self._watching is not None:
            self._watching.remove_reader(self._pidfd)
            self._watching = None

    def kill(self) -> None:
        """Send SIGKILL; a process that has ended already is no error.

        Raises:
            HostError: The kernel does not let us.
        """
        with (
            kernel_call(f"kill process {self.pid}", pid=self.pid),
            contextlib.suppress(ProcessLookupError),
        ):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; returns whether it did in time.

        A child of ours is reaped.

        Raises:
            CapacityError: The kernel has no room to watch another descriptor.
        """
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def note() -> None:
            if not ended.done():
                ended.set_result(None)

        with kernel_call(f"watch process {self.pid}", pid=self.pid):
            loop.add_reader(self._pidfd, note)
        try:
            async with asyncio.timeout(timeout_s):
                await ended
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._pidfd)
        self._reap()
        return True

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # it is somebody else's child
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if ended is not None:
                killed = ended.si_code != os.CLD_EXITED
                self.status = -ended.si_status if killed else ended.si_status


class Output:
    """The standard output of a program that was started; read it once, or close it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        """Let go of it; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    async def line(self, bytes_max: int) -> bytes:
        """Return the first line, or what comes before the end of the stream; closes it.

        Raises:
            HostError: There are more than `bytes_max` bytes without an end of line.
            CapacityError: The kernel has no room to watch another descriptor.
        """
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=bytes_max)
        with kernel_call("read from a pipe"), contextlib.ExitStack() as undo:
            pipe = undo.enter_context(os.fdopen(self._descriptor, "rb", buffering=0))
            self._descriptor = -1
            transport, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), pipe
            )
            undo.pop_all()
        try:
            return await reader.readline()
        except ValueError as error:
            raise HostError(f"a program printed a line of over {bytes_max} bytes") from error
        finally:
            transport.close()


def start(args: Sequence[str | Path], *, log: Path, limits: Limits) -> tuple[Process, Output]:
    """Start a program in a session of its own.

    Args:
        args: The program, by path, and its arguments.
        limits: What it may take of the host.
        log: Where its standard error goes, appended.

    Returns:
        The process, and its standard output, which is the caller's to close.

    Raises:
        CapacityError: There are too many processes or open files, or too little memory.
        HostError: It could not be started.
    """
    command = limits.command(args)
    with kernel_call(f"start {args[0]}"), contextlib.ExitStack() as undo:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        output = Output(reading)
        undo.callback(output.close)
        try:
            with log.open("ab") as stderr:
                child = subprocess.Popen(  # noqa: S603 - the program is a setting, never a request's
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=writing,
                    stderr=stderr,
                    env=plain_environment(),
                    cwd="/",
                    umask=limits.umask,
                    start_new_session=True,
                )
                # We wait by pidfd; told that it has ended, Popen neither waits nor warns.
                child.returncode = 0
                undo.callback(_end_child, child.pid)
        finally:
            os.close(writing)
        process = Process(child.pid, os.pidfd_open(child.pid))
        undo.pop_all()
        return process, output


def _end_child(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
