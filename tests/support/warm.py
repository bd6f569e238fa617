"""A process that has loaded what daemons need, and forks into them: what forkd does, for its tests.

To load a daemon's modules takes ten times as long as to start it.  The process is started once,
before the first test, where a test module asks for it (`wanted`).  What is forked from it differs
from a program in this: `/proc/PID/cmdline` and `/proc/PID/environ` are those of the warm process,
which is its parent, too.

    process = start(serve, folder=folder)
    process.stdout.readline()
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pytest

ROOT = Path(__file__).parents[2]

REQUEST_BYTES_MAX = 128 << 10
"""Longest request: the whole environment is in it."""

ANSWER_BYTES_MAX = 64

RUNS_TIMEOUT_S = 60.0
"""How long the process may take to load everything, and to answer."""

STARTED = """
import sys
from importlib import import_module
sys.path[:0] = {path!r}
from forkd.loading import without_collecting
with without_collecting():
    for module in {modules!r}:
        import_module(module)
from tests.support import warm
warm.serve({fd})
"""

wanted: list[str] = []
"""The modules that the warm process loads, put here by those that start processes of it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a process is forked for.

    Attributes:
        call: A function of a module, which returns the exit status.
        arguments: Its keyword arguments.
        environment: All of the process' environment.
        folder: Its working directory.
    """

    call: Callable[..., int]
    arguments: Mapping[str, object]
    environment: dict[str, str]
    folder: Path


class Process:
    """A process that was forked from the warm one; as `subprocess.Popen` as far as is needed.

    Attributes:
        stdout: What it prints.
        returncode: How it has ended; negative for a signal, None before it was waited for.
    """

    def __init__(self, warm: Warm, pid: int, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._warm = warm

    def poll(self) -> int | None:
        """Return its exit status if it has ended."""
        return self._ended(0)

    def wait(self, timeout_s: float) -> int:
        """Return its exit status, once it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not ended by then.
        """
        status = self._ended(timeout_s)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout_s)
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, within_s: float) -> int | None:
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)  # a zombie until its parent is asked about it
            try:
                if select.select([pidfd], [], [], within_s)[0]:
                    self.returncode = self._warm.status_of(self.pid)
            finally:
                os.close(pidfd)
        return self.returncode


class Warm:
    """The warm process, as who asks it sees it."""

    def __init__(self, modules: list[str]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            script = STARTED.format(
                path=[str(ROOT), str(ROOT / "src")], modules=modules, fd=theirs.fileno()
            )
            self._process = subprocess.Popen(  # noqa: S603 - our own
                [sys.executable, "-c", script], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._socket.settimeout(RUNS_TIMEOUT_S)

    def start(self, call: Callable[..., int], arguments: Mapping[str, object]) -> Process:
        """Fork a process that calls a function, and ends with the status that it returns."""
        request = Work(call, arguments, dict(os.environ), Path.cwd())
        ours, theirs = os.pipe()
        try:
            pid = self._ask(request, [0, theirs, 2])
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return Process(self, pid, open(ours, "rb"))  # noqa: PTH123 - a descriptor; its owner closes it

    def status_of(self, pid: int) -> int:
        """Return how a process that has ended did so."""
        return self._ask(pid, [])

    def _ask(self, request: Work | int, descriptors: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [pickle.dumps(request)], descriptors)
            return int(self._socket.recv(ANSWER_BYTES_MAX))

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.wait(RUNS_TIMEOUT_S)


_running: list[Warm] = []


def start(call: Callable[..., int], **arguments: object) -> Process:
    """Fork a process from the warm one; see `Warm.start`."""
    if not _running:
        _running.append(Warm(wanted))
    return _running[0].start(call, arguments)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start it before the first test, which would else be said to have left it behind."""
    if wanted and not session.config.option.collectonly:
        _running.append(Warm(wanted))


def pytest_sessionfinish() -> None:
    """End it."""
    while _running:
        _running.pop().close()


def serve(fd: int) -> None:
    """Be the warm process: do what is asked until nobody can ask any more."""
    with socket.socket(fileno=fd) as asked:
        while True:
            data, descriptors, _, _ = socket.recv_fds(asked, REQUEST_BYTES_MAX, 3)
            if not data:
                return
            request: Work | int = pickle.loads(data)  # noqa: S301 - of the tests that started us
            if isinstance(request, int):
                _, status = os.waitpid(request, 0)
                answer = os.waitstatus_to_exitcode(status)
            else:
                answer = os.fork()
                if answer == 0:
                    break
                for each in descriptors:
                    os.close(each)
            asked.send(str(answer).encode())
    _become(request, descriptors)


def _become(work: Work, descriptors: list[int]) -> None:
    """Do what is asked for in this process, and end it."""
    for number, each in enumerate(descriptors):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(work.environment)
    os.chdir(work.folder)
    sys.exit(work.call(**work.arguments))
