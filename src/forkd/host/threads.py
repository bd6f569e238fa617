"""Threads that run before there is work for them.

An executor of the standard library starts a thread when work comes.  Where the kernel refuses that
one (TasksMax=, kernel.pid_max), whoever asks gets a `RuntimeError`, and the work is done all the
same by the next thread that has time.  So all of them are started at the beginning, or none.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from forkd.errors import CapacityError


def start(count: int, name: str) -> ThreadPoolExecutor:
    """Return an executor of which every thread runs; shut it down when done.

    Args:
        count: How many threads it has.
        name: What their names begin with.

    Raises:
        CapacityError: There are too many processes and threads, or there is too little memory.
    """
    executor = ThreadPoolExecutor(count, name)
    all_here = threading.Barrier(count + 1)
    try:
        # None has time for another's wait, so that each is given to a thread of its own.
        for _ in range(count):
            executor.submit(all_here.wait)
        all_here.wait()
    except RuntimeError as error:  # what the standard library says of a thread that it cannot start
        all_here.abort()
        executor.shutdown()
        raise CapacityError(
            f"cannot start {count} threads: {error}; raise the limit of processes "
            "(TasksMax=, kernel.pid_max)"
        ) from error
    return executor
