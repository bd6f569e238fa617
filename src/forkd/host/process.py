"""Run other programs, and leave nothing of them behind.

`run` is the one place that starts a program and waits for it.  Whatever happens, it
returns or raises only when the program and everything in its process group has ended:

- it has a deadline, and a `Cancel` that another thread can set ends it at once;
- it is killed as a group, so that what it started goes with it;
- it gets SIGKILL from the kernel if we die first, where `setpriv` is installed;
- its output is bounded: standard output up to `STDOUT_BYTES_MAX`, and of both streams
  together a tail of `TAIL_BYTES_MAX` that goes into the error.

A program inherits neither our standard input nor our environment: maintainer scripts and
build tools must not see tokens.  `plain_environment` says what they get instead.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Self

from forkd.errors import HostError
from forkd.host.faults import kernel_call
from forkd.host.rlimits import BUILDER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from forkd.host.rlimits import Limits

STDOUT_BYTES_MAX = 16 * 1024 * 1024
"""Most standard output kept of one program; a program that writes more is ended."""

TAIL_BYTES_MAX = 8 * 1024
"""How much of the end of a program's output goes into the error that it causes."""

LINE_BYTES_MAX = 4 * 1024
"""Longest line handed to `on_line`; a longer one is handed over in pieces."""

_READ_BYTES = 64 * 1024
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
_PASSED_ON = ("HOME", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PASSED_ON_SUFFIXES = ("_proxy", "_PROXY")


@dataclass(frozen=True, slots=True)
class Finished:
    """A program that ended with status 0.

    Attributes:
        stdout: All it wrote to standard output.
        tail: The end of both its streams, as text.
    """

    stdout: bytes
    tail: str


class Cancel:
    """A flag that one thread sets and a program run by another notices at once.

    Holds a file descriptor: close it, or use it in a `with`.

    Raises:
        CapacityError: There are too many open files, now or in `wait`.
    """

    def __init__(self) -> None:
        with kernel_call("make an event"):
            self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self) -> None:
        """End what is running under this flag, and whatever would start under it."""
        os.eventfd_write(self._event, 1)

    def is_set(self) -> bool:
        """Tell whether `set` was called."""
        return self.wait(0)

    def wait(self, timeout_s: float) -> bool:
        """Wait until `set` is called, for `timeout_s` at most; tell whether it was."""
        with kernel_call("wait for an event"), selectors.DefaultSelector() as selector:
            selector.register(self._event, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the flag is set."""
        return self._event

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._event)


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told of a running program, and who may end it.

    Attributes:
        on_line: Called with each line of both streams, in the thread that called `run`.
        cancel: Ends the program when set.
    """

    on_line: Callable[[str], None] | None = None
    cancel: Cancel | None = None


def plain_environment(*more: str) -> dict[str, str]:
    """Return an environment fit for other people's programs.

    It holds a search path, a neutral locale, where temporary files go, how to reach
    the network, and the variables named in `more`; nothing else of ours.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or name in more or name.endswith(_PASSED_ON_SUFFIXES)
    }
    path = os.environ.get("PATH", os.defpath)
    return {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", **kept, "PATH": f"{path}:{_SBIN}"}


def message_in(said: str | bytes) -> str | None:
    """Return the message of an error that a program of ours says as JSON; None if it is none."""
    try:
        return str(json.loads(said)["message"])
    except (ValueError, LookupError, TypeError):
        return None


def installed(program: str) -> bool:
    """Tell whether `program` can be started by name."""
    return shutil.which(program, path=plain_environment()["PATH"]) is not None


def run(  # noqa: PLR0913 - each is a program's own
    args: Sequence[str | Path],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    watch: Watch | None = None,
    limits: Limits = BUILDER,
) -> Finished:
    """Run a program to its end.

    Args:
        args: The program, by name or path, and its arguments; no shell is involved.
        timeout_s: Seconds after which it is killed.
        env: Its whole environment; `plain_environment()` if None.
        cwd: Where it runs; our own working directory if None.
        watch: Hears its lines, and may end it.
        limits: What it may take of the host.

    Raises:
        HostError: It is not installed, was killed at the deadline or by `watch.cancel`,
            wrote too much, or ended with another status than 0.  The message ends with
            the tail of its output; the context has `program`, and `status` or `signal`.
        CapacityError: There are too many processes or open files, or too little memory.
    """
    environment = plain_environment() if env is None else dict(env)
    name = os.path.basename(args[0])  # noqa: PTH119 - args[0] may be a plain name
    program = shutil.which(args[0], path=environment.get("PATH", os.defpath))
    if program is None:
        raise HostError(f"{name} is not installed", program=name)
    command = limits.command([*dying_with_us(), program, *args[1:]])
    with kernel_call(f"run {name}", program=name):
        process = subprocess.Popen(  # noqa: S603 - callers pass lists, never a shell's line
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=cwd,
            umask=limits.umask,
            start_new_session=True,
        )
        running = _Running(process, name, watch or Watch())
        try:
            running.wait(time.monotonic() + timeout_s, timeout_s)
        finally:
            running.end()
    return running.finished()


def dying_with_us() -> list[str]:
    """Return the words before a command that make the kernel kill it when we die.

    Setting the flag ourselves would need code between fork and exec, which is not
    safe in a program with threads.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv is not None else []


@dataclass(slots=True)
class _Running:
    """A program between its start and its end, with what it has written so far."""

    process: subprocess.Popen[bytes]
    name: str
    watch: Watch
    stdout: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    partial: dict[int, bytes] = field(default_factory=dict)

    def wait(self, deadline: float, timeout_s: float) -> None:
        """Read what it writes until it ends, fails or is ended."""
        pidfd = os.pidfd_open(self.process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                for stream in self._streams():
                    os.set_blocking(stream.fileno(), False)
                    selector.register(stream, selectors.EVENT_READ)
                selector.register(pidfd, selectors.EVENT_READ)
                if self.watch.cancel is not None:
                    selector.register(self.watch.cancel, selectors.EVENT_READ)
                while self._step(selector, pidfd, deadline - time.monotonic(), timeout_s):
                    pass
        finally:
            os.close(pidfd)

    def _step(
        self, selector: selectors.BaseSelector, pidfd: int, left_s: float, timeout_s: float
    ) -> bool:
        """Wait for one thing to happen; return whether to go on."""
        ready = [key.fileobj for key, _ in selector.select(max(left_s, 0))]
        if not ready:
            raise self._error(f"did not end within {timeout_s:g} seconds")
        if self.watch.cancel is not None and self.watch.cancel in ready:
            raise self._error("was cancelled")
        for stream in self._streams():
            if stream in ready and not self._read(stream):
                selector.unregister(stream)
        if pidfd not in ready:
            return True
        for stream in self._streams():
            while self._read(stream):  # what it wrote last; never waits for a grandchild
                pass
        return False

    def _streams(self) -> Iterator[IO[bytes]]:
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                yield stream

    def _read(self, stream: IO[bytes]) -> bool:
        """Take what one stream holds; return whether it may hold more."""
        try:
            data = os.read(stream.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if stream is self.process.stdout:
            self.stdout += data
            if len(self.stdout) > STDOUT_BYTES_MAX:
                raise self._error(f"wrote more than {STDOUT_BYTES_MAX} bytes")
        self.tail = (self.tail + data)[-TAIL_BYTES_MAX:]
        self._tell(stream.fileno(), data)
        return bool(data)

    def _tell(self, number: int, data: bytes) -> None:
        if self.watch.on_line is None:
            return
        text = self.partial.pop(number, b"") + data.replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        if len(rest) >= LINE_BYTES_MAX or not data:
            lines, rest = [*lines, rest], b""
        self.partial[number] = rest
        for line in lines:
            for start in range(0, len(line), LINE_BYTES_MAX):
                self.watch.on_line(line[start : start + LINE_BYTES_MAX].decode(errors="replace"))

    def end(self) -> None:
        """Kill what is left of the group, reap the program and close its pipes."""
        try:
            self._kill()
            self.process.wait()
        finally:
            for stream in self._streams():
                stream.close()

    def _kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended, and left nobody
            pass
        except PermissionError:  # nobody of its group is ours to kill but, perhaps, itself
            self.process.kill()

    def finished(self) -> Finished:
        """Return what it wrote, if it ended well."""
        status = self.process.returncode
        if status < 0:
            raise self._error(f"was killed by signal {-status}", signal=-status)
        if status > 0:
            raise self._error(f"ended with status {status}", status=status)
        return Finished(bytes(self.stdout), self._tail())

    def _tail(self) -> str:
        return self.tail.decode(errors="replace").strip()

    def _error(self, what: str, **context: int) -> HostError:
        tail = self._tail()
        message = f"{self.name} {what}" + (f":\n{tail}" if tail else "")
        return HostError(message, program=self.name, **context)
