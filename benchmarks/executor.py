"""Compare an executor of forks with a process pool.

    python -m benchmarks.executor TAG       prints a table; the daemon is that of `Client()`

Three figures, each of a pool of processes and of an executor over the snapshot TAG, which has
numpy imported.  Processes are started by `spawn`, as on macOS and Windows and, for programs with
threads, on Linux: each imports numpy by itself.

| figure | from | until |
|---|---|---|
| `start_ms` | the executor is called | each of its workers has summed a numpy array |
| `task_ms` | a map over small tasks begins | the last result is there; per task |
| `fresh_ms` | the same, each task in a worker that has run nothing before | likewise |
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from forkd.executor import ForkExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

WORKERS = 4
TASKS = 200
FRESH_TASKS = 20
ROUNDS = 3

SIDE = 4

DEADLINE_S = 300.0
"""How long a fork has to answer, where a processor is emulated."""


def total(number: int) -> int:
    """Return what numpy makes of a number; the same in each kind of worker."""
    import numpy  # noqa: ICN001, PLC0415 - in a worker, not here

    return int(numpy.full((SIDE, SIDE), number).sum())


def processes(*, fresh: bool) -> Executor:
    """Return a pool of processes."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(WORKERS, context, max_tasks_per_child=1 if fresh else None)


def measure(forks: Callable[..., Executor]) -> dict[str, dict[str, float]]:
    """Return each figure of both, and the ratio of forks to processes.

    Args:
        forks: Makes an executor of forks; of fresh ones if asked.
    """
    figures: dict[str, dict[str, float]] = {}
    for name, one in (("start_ms", start_ms), ("task_ms", task_ms), ("fresh_ms", fresh_ms)):
        rounds: dict[str, list[float]] = {"forks": [], "processes": []}
        for _ in range(ROUNDS):  # in turn: whatever else the host does hits both
            rounds["forks"].append(one(forks))
            rounds["processes"].append(one(processes))
        medians = {side: statistics.median(times) for side, times in rounds.items()}
        figures[name] = {**medians, "ratio": medians["forks"] / medians["processes"]}
    return figures


def start_ms(make: Callable[..., Executor]) -> float:
    """Return how long it takes until each worker has done something."""
    began = time.perf_counter()
    with make(fresh=False) as executor:
        _check(executor, range(WORKERS))
        return _ms_since(began)


def task_ms(make: Callable[..., Executor]) -> float:
    """Return how long a small task takes, all workers together, once they have begun."""
    with make(fresh=False) as executor:
        _check(executor, range(WORKERS))
        began = time.perf_counter()
        _check(executor, range(TASKS))
        return _ms_since(began) / TASKS


def fresh_ms(make: Callable[..., Executor]) -> float:
    """Return how long a small task takes in a worker of its own."""
    with make(fresh=True) as executor:
        _check(executor, range(WORKERS))
        began = time.perf_counter()
        _check(executor, range(FRESH_TASKS))
        return _ms_since(began) / FRESH_TASKS


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1000


def _check(executor: Executor, numbers: Sequence[int]) -> None:
    found = list(executor.map(total, numbers))
    if found != [SIDE * SIDE * number for number in numbers]:
        raise SystemExit(f"wrong results: {found}")


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tag", help="a snapshot with numpy imported, and this program's Python")
    tag = parser.parse_args().tag
    # Sent whole: guests have no such module.
    found: Any = measure(of_tag(tag))
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


def of_tag(tag: str) -> Callable[..., Executor]:
    """Return what makes executors of forks of a snapshot, in which this module's tasks run."""
    here = sys.modules[__name__]
    return lambda *, fresh: ForkExecutor(
        tag, workers=WORKERS, fresh=fresh, modules=[here], deadline_s=DEADLINE_S
    )


if __name__ == "__main__":
    main()
