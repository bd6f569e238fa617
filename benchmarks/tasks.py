"""What workers do in `benchmarks.executor`.

Apart, because a process that is started by `spawn` imports the module of its tasks: what that
imports would count as the start of a pool.
"""

from __future__ import annotations

SIDE = 4


def total(number: int) -> int:
    """Return what numpy makes of a number; the same in each kind of worker."""
    import numpy  # noqa: ICN001, PLC0415 - in a worker, not here

    return int(numpy.full((SIDE, SIDE), number).sum())


def worker() -> str:
    """Do the same, and return a name that each worker has for itself."""
    import builtins  # noqa: PLC0415 - the worker's
    import uuid  # noqa: PLC0415 - the worker's

    total(1)
    name: str = vars(builtins).setdefault("_benchmark_worker", uuid.uuid4().hex)
    return name
