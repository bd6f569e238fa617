"""What forks cost beside processes: how it is measured, and how it is shown."""

from __future__ import annotations

import json
from concurrent.futures import Executor, Future
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import executor, pools, testing
from benchmarks.harness import machine
from benchmarks.report import show
from benchmarks.run import PARTS, steps
from forkd.errors import EngineError
from tools import gen_executor_times

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.harness import Json


class Named(Executor):
    """An executor whose tasks are run by workers in a given order."""

    def __init__(self, names: str) -> None:
        self.left = list(names)

    def submit(self, *_: object, **__: object) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self.left.pop(0))
        return future


def test_workers_have_begun_when_each_one_has_run_a_task() -> None:
    quick = Named("aaaabbccddee")

    executor.begin(quick)

    assert len(quick.left) == 0


def test_figures_are_medians_of_forks_and_processes_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[bool] = []

    def figure(make: object) -> float:
        order.append(make is executor.pool_of_processes)
        return {True: 2.0, False: 5.0}[order[-1]] + len(order)

    for name in ("start_ms", "task_ms", "fresh_ms"):
        monkeypatch.setattr(executor, name, figure)

    told: list[str] = []
    found = executor.measure(lambda **_: Named(""), 3, told.append)

    assert len(told) == executor.STEPS
    assert found["start_ms"] == {"forks": 8.0, "processes": 6.0, "ratio": 8.0 / 6.0}
    assert order == [False, True] * 9


def of_tests(monkeypatch: pytest.MonkeyPatch) -> Json:
    times = count(1)
    monkeypatch.setattr(testing, "run_s", lambda *_: float(next(times)))
    return testing.measure("tag", None, 3, str)


def test_runs_of_tests_take_turns_and_are_compared_with_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = of_tests(monkeypatch)

    assert [found[name] for name in testing.ways("tag")] == [5.0, 6.0, 7.0, 8.0]
    assert found["fresh_ratio"] == 8.0 / 5.0
    assert len(testing.ways("tag")) == testing.STEPS


def test_a_run_in_which_a_test_fails_counts_for_nothing(tmp_path: Path) -> None:
    testing.write(tmp_path)

    assert testing.run_s(tmp_path, (), None) > 0
    (tmp_path / "test_0.py").write_text("def test_it():\n    raise LookupError('not this one')\n")
    with pytest.raises(EngineError, match="not this one"):
        testing.run_s(tmp_path, (), None)


def test_forks_and_processes_are_compared_only_if_that_is_asked_for() -> None:
    assert "executor" not in PARTS
    assert steps(frozenset({"executor"}), quick=True) == 1 + pools.STEPS + 1


def test_the_figures_are_shown_and_become_parts_of_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = {"forks": 1500.4, "processes": 1000.0, "ratio": 1.5004}
    tasks = dict.fromkeys(("start_ms", "task_ms", "fresh_ms"), figure)
    bench: Json = {"machine": machine("a test") | {"cpus": 2}, "started_at": "2026-11-28T04:00:00"}
    bench |= {"executor": {**tasks, "rounds": 3}, "testing": of_tests(monkeypatch)}
    show(bench)
    pools.publish(bench, tmp_path / "figures.json")
    measured = json.loads((tmp_path / "figures.json").read_text())

    page = "above\n" + gen_executor_times.BEGIN + "old" + gen_executor_times.END + "below\n"
    of_tasks = gen_executor_times.with_part(page, gen_executor_times.tasks(measured))
    of_runs = gen_executor_times.with_part(page, gen_executor_times.tests(measured))

    assert "1,500 ms" in capsys.readouterr().out
    assert "| four workers have begun | 1,500 ms | 1,000 ms | 1.50 |" in of_tasks.splitlines()
    assert "| `pytest -n 4` (pytest-xdist) | 6.0 s | 1.20 |" in of_runs.splitlines()
    for each in (of_tasks, of_runs):
        assert each.startswith("above\n")
        assert each.endswith("below\n")
        assert "old" not in each
        assert "Machine: a test, 2 CPUs, 2026-11-28; medians of 3 rounds, by" in each


def test_a_page_without_a_place_for_the_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        gen_executor_times.with_part("a page", "a part")
