"""Make calls of the kernel fail wherever forkd makes them; the calls are found by running it.

    with Injector() as injector:
        with injector.recording() as sites:         # the calls that `work` makes
            await work()
        fault = Fault(site, errno.EMFILE)
        with injector.happening(site, fault.happen):
            await work()                            # that very call raises OSError(EMFILE)

A *site* is a function of the interpreter that asks the kernel, and the lines of forkd that led to
it, as far back as the beginning of the task or thread.  A profile function is told of each call of
a C function before it is made, and what it raises there is what the call gives.

`fault_table` says which errors each function can give.  A function of `MODULES` that is not in it
is noted in `undecided`: whoever makes forkd call another one decides.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import selectors
import socket
import sqlite3
import subprocess
import sys
import tarfile
from asyncio import unix_events
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from forkd.host import files
from tests.support.fault_table import AFTERWARDS, ERRORS, MODULES, SAFE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from types import BuiltinFunctionType, CodeType, FrameType

P = ParamSpec("P")
T = TypeVar("T")

FORKD = f"{Path(files.__file__).parents[1]}/"

STANDS_FOR: dict[CodeType, str] = {
    socket.socket.__init__.__code__: "socket.socket",
    selectors.EpollSelector.__init__.__code__: "select.epoll",
    files._syncfs.__code__: "syncfs",  # noqa: SLF001 - a foreign function
}
"""Python functions that are called for what a profile function is not told of: types, foreign
functions."""

OF_DESCRIPTORS = {os.fdopen.__code__, subprocess.Popen.__init__.__code__}
"""Functions that make files of open descriptors, which cannot fail as opening a path can."""


OF_PIPES = {("posix.fstat", unix_events.__file__), ("posix.read", subprocess.__file__)}
"""What the standard library asks of pipes that it has just made, which always answer, by file."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place where forkd asks the kernel.

    Attributes:
        function: What it calls.
        lines: The lines of forkd that led there, the last one first.
    """

    function: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.function} at {' < '.join(self.lines)}"

    def is_under(self, function: str, *callers: str) -> bool:
        """Whether it is a call of `function` that certain functions of forkd led to, in order."""
        names = iter([line.rpartition(" ")[2] for line in self.lines])
        return self.function == function and all(each in names for each in callers)


@dataclass(frozen=True, slots=True)
class Fault:
    """A call that fails, and how."""

    site: Site
    number: int

    def __str__(self) -> str:
        return f"{errno.errorcode[self.number]} of {self.site}"

    def happen(self) -> None:
        """Raise what the call raises."""
        if self.site.function.startswith(("sqlite3.", "_sqlite3.")):
            raise _sqlite_error(self.number)
        if self.site.function == "_thread.start_new_thread":
            raise RuntimeError("can't start new thread")
        raise OSError(self.number, os.strerror(self.number))


class Injector:
    """Watches this process, its executors' threads included, for as long as its block lasts.

    Attributes:
        undecided: Calls of functions that `fault_table` does not know.
        fired: Whether what was to happen last has happened.
    """

    def __init__(self) -> None:
        self.undecided: set[str] = set()
        self.fired = False
        self._found: dict[Site, None] | None = None
        self._awaited: tuple[Site, Callable[[], None]] | None = None
        self._names: dict[tuple[str, object], str | None] = {}
        self._files: dict[str, str | None] = {}
        self._patched = contextlib.ExitStack()

    def __enter__(self) -> Self:
        submit = ThreadPoolExecutor.submit

        def watched(
            pool: ThreadPoolExecutor, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
        ) -> Future[T]:
            return submit(pool, self._run, call, *args, **kwargs)

        setattr(ThreadPoolExecutor, "submit", watched)  # noqa: B010 - mypy knows what it was
        self._patched.callback(setattr, ThreadPoolExecutor, "submit", submit)
        self._patched.callback(sys.setprofile, None)
        return self

    def __exit__(self, *_: object) -> None:
        self._patched.close()

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict[Site, None]]:
        """Note, in order, the sites that are reached within the block."""
        found: dict[Site, None] = {}
        self._found = found
        sys.setprofile(self._told)
        try:
            yield found
        finally:
            sys.setprofile(None)
            self._found = None

    @contextlib.contextmanager
    def happening(self, site: Site, act: Callable[[], None]) -> Iterator[None]:
        """Have `act` called when a site is next reached within the block, before the call is made.

        What it raises is what the call gives.
        """
        self._awaited, self.fired = (site, act), False
        sys.setprofile(self._told)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._awaited = None

    def _run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what an executor was given; its thread may have run other things before."""
        sys.setprofile(None if self._found is None and self._awaited is None else self._told)
        return call(*args, **kwargs)

    def _told(self, frame: FrameType, event: str, called: BuiltinFunctionType) -> None:
        """Hear of something that is about to be called (called by the interpreter)."""
        name = self._name(frame, event, called)
        if name is None or (site := self._site(name, frame, event)) is None:
            return
        if name not in ERRORS and name not in AFTERWARDS:
            self.undecided.add(str(site))
        elif self._found is not None:
            self._found.setdefault(site)
        elif self._awaited is not None and self._awaited[0] == site:
            (_, act), self._awaited = self._awaited, None
            self.fired = True
            act()

    def _name(self, frame: FrameType, event: str, called: BuiltinFunctionType) -> str | None:
        """Return the name of a function that asks the kernel; None for all others."""
        if event == "call":
            return STANDS_FOR.get(frame.f_code)
        if event not in {"c_call", "c_return"}:
            return None
        key = (called.__name__, called.__module__ or type(called.__self__))
        if key not in self._names:
            self._names[key] = _name_of(called)
        name = self._names[key]
        if name is None or (name in AFTERWARDS) != (event == "c_return"):
            return None
        return None if name in AFTERWARDS and not _writes(called.__self__) else name

    def _site(self, name: str, frame: FrameType | None, event: str) -> Site | None:
        lines = []
        frame = frame.f_back if event == "call" and frame is not None else frame
        if frame is not None and frame.f_code is os.path.exists.__code__ and _is_tar(frame.f_back):
            return None
        if frame is not None and (name, frame.f_code.co_filename) in OF_PIPES:
            return None
        if name == "io.open" and frame is not None and frame.f_code in OF_DESCRIPTORS:
            return None
        while frame is not None:
            if frame.f_code.co_filename == logging.__file__:
                return None  # whose handlers answer for themselves
            if (file := self._file(frame.f_code.co_filename)) is not None:
                lines.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        return Site(name, tuple(lines)) if lines else None

    def _file(self, path: str) -> str | None:
        if path not in self._files:
            self._files[path] = path.removeprefix(FORKD) if path.startswith(FORKD) else None
        return self._files[path]


def _is_tar(frame: FrameType | None) -> bool:
    """Whether `tarfile` looks for a folder: if it is not told of one, making it says why."""
    return frame is not None and frame.f_code.co_filename == tarfile.__file__


def _name_of(called: BuiltinFunctionType) -> str | None:
    """Return how `fault_table` calls a C function, if it asks the kernel and may be refused."""
    module: str | None = called.__module__
    name = f"{module}.{called.__name__}"
    if module is None:
        owners = type(called.__self__).__mro__
        owner = next((each for each in owners if called.__name__ in vars(each)), object)
        module, name = owner.__module__, f"{owner.__module__}.{owner.__name__}.{called.__name__}"
    return name if module in MODULES and not name.startswith(SAFE) else None


def _writes(file: object) -> bool:
    """Whether a file, which may be closed, keeps what was written until it is closed."""
    return isinstance(file, io.BufferedWriter) or getattr(file, "mode", "r") in {"w", "a"}


def _sqlite_error(number: int) -> sqlite3.Error:
    error = sqlite3.OperationalError(f"as {errno.errorcode[number]}")
    full = number == errno.ENOSPC
    error.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_IOERR
    return error
