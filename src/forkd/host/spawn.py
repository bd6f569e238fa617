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
from forkd.host.process import plain_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Process:
    """A process, held by its pidfd; close it, or leave its `with` block, to let go."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._watching: asyncio.AbstractEventLoop | None = None

    @classmethod
    def open(cls, pid: int) -> Self | None:
        """Return the process that `pid` means now; None if there is none.

        Raises:
            HostError: The kernel gives out no pidfds.
        """
        try:
            return cls(pid, os.pidfd_open(pid))
        except ProcessLookupError:
            return None
        except OSError as error:
            raise HostError(f"cannot hold process {pid}: {error.strerror}", pid=pid) from error

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
        """

        def ended() -> None:
            self._unwatch()
            on_end()

        self._watching = asyncio.get_running_loop()
        self._watching.add_reader(self._pidfd, ended)

    def _unwatch(self) -> None:
        if self._watching is not None:
            self._watching.remove_reader(self._pidfd)
            self._watching = None

    def kill(self) -> None:
        """Send SIGKILL; a process that has ended already is no error."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; returns whether it did in time.

        A child of ours is reaped.
        """
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def note() -> None:
            if not ended.done():
                ended.set_result(None)

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
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)


def start(args: Sequence[str | Path], *, log: Path) -> tuple[Process, int]:
    """Start a program in a session of its own.

    Args:
        args: The program, by path, and its arguments.
        log: Where its standard error goes, appended.

    Returns:
        The process, and the reading end of its standard output, which is the
        caller's to close.

    Raises:
        HostError: It could not be started.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        with log.open("ab") as stderr:
            child = subprocess.Popen(  # noqa: S603 - the program is a setting, never a request's
                [str(arg) for arg in args],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=stderr,
                env=plain_environment(),
                cwd="/",
                start_new_session=True,
            )
    except OSError as error:
        os.close(reading)
        raise HostError(f"cannot start {args[0]}: {error.strerror}") from error
    finally:
        os.close(writing)
    # We wait by pidfd; told that it has ended, Popen neither waits nor warns.
    child.returncode = 0
    try:
        return Process(child.pid, os.pidfd_open(child.pid)), reading
    except OSError as error:
        os.close(reading)
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        raise HostError(f"cannot hold {args[0]}: {error.strerror}") from error
