"""The wall clock: how far it is from the monotonic one, and being told when it is set.

The kernel moves both clocks alike while it slews them, so that their distance changes only when
the wall clock is set, or the host was suspended, during which the monotonic clock does not run.

Source: timerfd_create(2) for `TFD_TIMER_CANCEL_ON_SET`; the kernel cancels such timers also when
it resumes (`timerfd_resume` in fs/timerfd.c).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from typing import TYPE_CHECKING, Self

from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from types import TracebackType

_ABSTIME, _CANCEL_ON_SET = 1, 2
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_NEVER_S = 2**40
"""When the timer would fire: in 36,000 years."""

_READINGS = 10
"""How often both clocks are read: in between this thread may lose its processor."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class _Spec(ctypes.Structure):
    """`struct itimerspec` of 64-bit systems."""

    _fields_ = [(name, ctypes.c_int64) for name in ("every_s", "every_ns", "at_s", "at_ns")]


_LIBC.timerfd_settime.argtypes = (
    ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Spec), ctypes.c_void_p,
)  # fmt: skip


def distance_ns() -> int:
    """Return how far the wall clock is ahead of the monotonic one, by the quickest reading."""
    return min(_reading() for _ in range(_READINGS))[1]


def _reading() -> tuple[int, int]:
    """Return how long a reading of both clocks took, and how far they were apart."""
    before = time.monotonic_ns()
    wall = time.time_ns()
    took = time.monotonic_ns() - before
    return took, wall - before - took // 2


class Steps:
    """Tells when the wall clock was set, or the host resumed; leave its `with` block to let go.

    Raises:
        CapacityError: There are too many open files.
        HostError: The kernel has no such timers.
    """

    def __init__(self) -> None:
        self._told = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        with kernel_call("watch the wall clock"):
            self._timer = _LIBC.timerfd_create(time.CLOCK_REALTIME, _FLAGS)
            if self._timer < 0:
                raise _last_error()
        try:
            self._arm()
            with kernel_call("watch the wall clock"):
                self._loop.add_reader(self._timer, self._note)
        except BaseException:
            os.close(self._timer)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.remove_reader(self._timer)
        os.close(self._timer)

    async def wait(self, timeout_s: float) -> None:
        """Return when the clock was set since the last call, or after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._told.wait()
        self._told.clear()

    def _note(self) -> None:
        """Tell of a step, and have the timer tell of the next one."""
        with contextlib.suppress(OSError):  # ECANCELED is what it says; there is nothing to read
            os.read(self._timer, 8)
        self._arm()
        self._told.set()

    def _arm(self) -> None:
        spec = _Spec(at_s=_NEVER_S)
        flags = _ABSTIME | _CANCEL_ON_SET
        with kernel_call("watch the wall clock"):
            if _LIBC.timerfd_settime(self._timer, flags, ctypes.byref(spec), None):
                raise _last_error()


def _last_error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
