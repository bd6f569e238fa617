"""Measure how fast this host's time-stamp counter runs.

An emulated machine reads the host's counter, and tells the time by it, so its kernel has to know
the frequency.  By itself it counts against a timer that QEMU serves; where the host was too busy to
serve that on time it was 3.75 times off, and so were all clocks and deadlines inside.  The host's
kernel knows the frequency and tells nobody, so it is measured, with the instruction that reads the
counter.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_RDTSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")
"""`rdtsc; shl rdx, 32; or rax, rdx; ret`: a function of C without arguments."""

_WINDOW_NS = 20_000_000
"""For so long it is counted.  The ends are known to a microsecond, so the error is below 0.1 ‰."""

_TRIES = 100
"""How often each end is read; the reading that nothing came between counts."""


class _Reading(NamedTuple):
    """One look at both clocks; `within_ns` says how far they may have been apart."""

    within_ns: int
    at_ns: int
    ticks: int


def counter_khz() -> int | None:
    """Return the frequency of the time-stamp counter; None where no code may be made to read it."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    page.write(_RDTSC)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    read = ctypes.CFUNCTYPE(ctypes.c_uint64)(address)
    first = _look(read)
    last = _look(read)
    while last.at_ns - first.at_ns < _WINDOW_NS:
        last = _look(read)
    return round((last.ticks - first.ticks) * 1_000_000 / (last.at_ns - first.at_ns))


def _look(read: Callable[[], int]) -> _Reading:
    return min(_look_once(read) for _ in range(_TRIES))


def _look_once(read: Callable[[], int]) -> _Reading:
    before_ns = time.monotonic_ns()
    ticks = read()
    after_ns = time.monotonic_ns()
    return _Reading(after_ns - before_ns, (before_ns + after_ns) // 2, ticks)
