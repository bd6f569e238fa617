"""Compare an executor of forks with a process pool.

`make bench ARGS='--only executor'` measures over real machines, and writes the figures of
docs/howto/run-tasks-in-forks.md.

Three figures, each of a pool of processes and of an executor over the snapshot TAG, which has
numpy imported.  Processes are started by `spawn`, as on macOS and Windows and, for programs with
threads, on Linux: each imports numpy by itself.  They would also import the main module of the
program, so that `measured` starts one that has none.

| figure | from | until |
|---|---|---|
| `start_ms` | the executor is called | each of its workers has summed a numpy array |
| `task_ms` | each worker has run a task, and a map over small ones begins | its end; per task |
| `fresh_ms` | the same, each task in a worker that has run nothing before | likewise |
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import tasks
from forkd.errors import EngineError
from forkd.executor import ForkExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

ROOT = Path(__file__).resolve().parent.parent

WORKERS = 4
TASKS = 200
FRESH_TASKS = 20
ROUNDS = 3
ROUNDS_QUICK = 1
"""How often each figure is taken."""

STEPS = 3
"""How many figures there are."""

DEADLINE_S = 300.0
"""How long a fork has to answer, where a processor is emulated."""


def pool_of_processes(*, fresh: bool) -> Executor:
    """Return a pool of processes."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(WORKERS, context, max_tasks_per_child=1 if fresh else None)


def measured(
    tag: str, url: str, rounds: int = ROUNDS, tell: Callable[[str], object] = str
) -> dict[str, dict[str, float]]:
    """Return what `measure` does in a program of its own.

    Args:
        tag: A snapshot with numpy imported, and this program's Python.
        url: Of the daemon.
        rounds: Of whose times the medians are taken.
        tell: Is told what begins, `STEPS` times.

    Raises:
        EngineError: It failed.
    """
    code = f"from benchmarks import executor; executor.tell({tag!r}, {rounds})"
    found: dict[str, dict[str, float]] = {}
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "FORKD_URL": url},
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        ) as process,
    ):
        for line in process.stdout or ():
            said = json.loads(line)
            if isinstance(said, str):
                tell(said)
            else:
                found = said
        if process.wait() != 0:
            complaints.seek(0)
            raise EngineError(f"comparing tasks failed: {complaints.read()}")
    return found


def tell(tag: str, rounds: int) -> None:
    """Measure with the daemon of `Client()`; print a line for what begins, then the figures."""

    def say(said: object) -> None:
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()

    say(measure(of_tag(tag), rounds, say))


def measure(
    forks: Callable[..., Executor], rounds: int, tell: Callable[[str], object] = str
) -> dict[str, dict[str, float]]:
    """Return each figure of both, and the ratio of forks to processes.

    Args:
        forks: Makes an executor of forks; of fresh ones if asked.
        rounds: Of whose times the medians are taken.
        tell: Is told what begins, `STEPS` times.
    """
    figures: dict[str, dict[str, float]] = {}
    for name, one in (("start_ms", start_ms), ("task_ms", task_ms), ("fresh_ms", fresh_ms)):
        tell(f"tasks in forks and in processes, {name}")
        times: dict[str, list[float]] = {"forks": [], "processes": []}
        for _ in range(rounds):  # in turn: whatever else the host does hits both
            times["forks"].append(one(forks))
            times["processes"].append(one(pool_of_processes))
        figures[name] = compared(times["forks"], times["processes"])
    return figures


def compared(forks_ms: Sequence[float], processes_ms: Sequence[float]) -> dict[str, float]:
    """Return the medians of both, and the ratio of forks to processes."""
    forks, processes = statistics.median(forks_ms), statistics.median(processes_ms)
    return {"forks": forks, "processes": processes, "ratio": forks / processes}


def start_ms(make: Callable[..., Executor]) -> float:
    """Return how long it takes until each worker has done something."""
    began = time.perf_counter()
    with make(fresh=False) as executor:
        begin(executor)
        return _ms_since(began)


def task_ms(make: Callable[..., Executor]) -> float:
    """Return how long a small task takes, all workers together, once they have begun."""
    with make(fresh=False) as executor:
        begin(executor)
        began = time.perf_counter()
        _check(executor, range(TASKS))
        return _ms_since(began) / TASKS


def fresh_ms(make: Callable[..., Executor]) -> float:
    """Return how long a small task takes in a worker of its own."""
    with make(fresh=True) as executor:
        begin(executor)
        began = time.perf_counter()
        _check(executor, range(FRESH_TASKS))
        return _ms_since(began) / FRESH_TASKS


def begin(executor: Executor) -> None:
    """Keep all workers busy until each one has run a task; one that is quick does not run all."""
    seen: set[str] = set()
    pending = {executor.submit(tasks.worker) for _ in range(WORKERS)}
    while len(seen) < WORKERS:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        seen |= {each.result() for each in done}
        if len(seen) < WORKERS:
            pending |= {executor.submit(tasks.worker) for _ in done}


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1000


def _check(executor: Executor, numbers: Sequence[int]) -> None:
    found = list(executor.map(tasks.total, numbers))
    if found != [tasks.SIDE * tasks.SIDE * number for number in numbers]:
        raise SystemExit(f"wrong results: {found}")


def of_tag(tag: str) -> Callable[..., Executor]:
    """Return what makes executors of forks of a snapshot, in which `benchmarks.tasks` can run."""
    return lambda *, fresh: ForkExecutor(
        tag, workers=WORKERS, fresh=fresh, modules=[tasks], deadline_s=DEADLINE_S
    )
