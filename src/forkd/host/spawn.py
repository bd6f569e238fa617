"""Start programs that outlive us, and watch processes that are not our children.

`host.process.run` is for programs that we wait for.  A VMM process is the
opposite: it gets a session of its own, keeps nothing of ours, and lives on when
the daemon ends.  What we hold is a `Process`: a pidfd, which cannot come to
mean another process as a pid can.

What such a process logs comes through a pipe and not from a file that it has open: it is kept up
to a limit, and nobody can fill a disk with it, neither the process nor those that it forks.  It
never waits for us to read, and writes to nobody when we are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Self

from forkd.errors import HostError
from forkd.host.cgroupfs import PROCESSES
from forkd.host.faults import kernel_call
from forkd.host.process import plain_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from forkd.host.rlimits import Limits


LOG_BYTES_MAX = 1 << 20
"""Most that is kept of what a process, and all that it forks, log; the rest is dropped."""

LOG_PIECE_BYTES_MAX = 64 * 1024
"""Most of it that is read at once: what fits into a pipe."""

SHELL = "/bin/sh"
"""What enters a group for a program, by its number, which stays that of the program."""

LOG_FULL = b"\n... the log is full\n"


class _Log:
    """Copies what a process logs to a file, in the event loop, as far as there is room.

    The file is in a folder of ours that is in memory, and short; so writing to it takes no thread.
    """

    def __init__(self, reading: int, path: Path) -> None:
        self._reading = reading
        self._left_bytes = LOG_BYTES_MAX
        self._loop = asyncio.get_running_loop()
        self._path = path
        self._keep(b"")
        self._loop.add_reader(reading, self._copy)

    def drain(self) -> None:
        """Copy all that was logged until now."""
        while self._copy():
            pass

    def close(self) -> None:
        """Let go; who still logs writes to nobody.  Idempotent."""
        if self._reading >= 0:
            self._loop.remove_reader(self._reading)
            os.close(self._reading)
            self._reading = -1

    def _copy(self) -> bool:
        """Copy a piece; return whether there may be more."""
        if self._reading < 0:
            return False
        try:
            data = os.read(self._reading, min(LOG_PIECE_BYTES_MAX, self._left_bytes))
            self._left_bytes -= len(data)
            self._keep(data if self._left_bytes else data + LOG_FULL)
        except BlockingIOError:
            return False
        except OSError:  # a log that cannot be kept is no reason to end what logs
            data = b""
        if not data or not self._left_bytes:
            self.close()
        return bool(data)

    def _keep(self, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o600)
        try:
            os.write(file, data)
        finally:
            os.close(file)


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
        self._log: _Log | None = None
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
        """Let go of the process, and of its log if we started it; idempotent."""
        self._unwatch()
        if self._log is not None:
            self._log.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def drain_log(self) -> None:
        """Have in its file what a process that we started has logged until now."""
        if self._log is not None:
            self._log.drain()

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


_ENTER = (SHELL, "-c", 'echo 0 > "$0" && exec "$@"')
"""Words before the name of a file by which a group is entered, and before those of a program that
is started once it is: what the program takes from its first page on counts for the group."""


def start(
    args: Sequence[str | Path], *, log: Path, limits: Limits, cgroup: Path | None = None
) -> tuple[Process, Output]:
    """Start a program in a session of its own.

    Args:
        args: The program, by path, and its arguments.
        limits: What it may take of the host.
        log: Where its standard error goes, appended, while the process is held.
        cgroup: The group that it is in from its start; None for ours.  It ends at once, and says so
            in its log, if it may not enter that.

    Returns:
        The process, and its standard output, which is the caller's to close.

    Raises:
        CapacityError: There are too many processes or open files, or too little memory.
        HostError: It could not be started.
    """
    command = limits.command(args)
    if cgroup is not None:
        command = [*_ENTER, str(cgroup / PROCESSES), *command]
    with kernel_call(f"start {args[0]}"), contextlib.ExitStack() as undo:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        output = Output(reading)
        undo.callback(output.close)
        with contextlib.ExitStack() as theirs:
            theirs.callback(os.close, writing)
            kept, stderr = _open_log(log, undo)
            theirs.callback(os.close, stderr)
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
        process = Process(child.pid, os.pidfd_open(child.pid))
        process._log = kept  # noqa: SLF001 - of this very module
        undo.pop_all()
        return process, output


def _open_log(path: Path, undo: contextlib.ExitStack) -> tuple[_Log, int]:
    """Return what copies to a log, and the descriptor to log to, which never blocks."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        kept = _Log(reading, path)
    except BaseException:
        os.close(reading)
        os.close(writing)
        raise
    undo.callback(kept.close)
    return kept, writing


def _end_child(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
