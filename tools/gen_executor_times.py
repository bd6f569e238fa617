"""Put what forks cost beside processes into the pages about both, from the figures of a run.

    python -m tools.gen         writes them, with everything else that is generated

`make bench ARGS="--only executor"` measures, and writes `docs/assets/executor-times.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs/assets/executor-times.json"
TASKS_PAGE = ROOT / "docs/howto/run-tasks-in-forks.md"
TESTS_PAGE = ROOT / "docs/howto/test-with-forks.md"

BEGIN = "<!-- Begin of what tools/gen_executor_times.py generates - do not edit -->\n"
END = "<!-- End of what tools/gen_executor_times.py generates -->\n"

TASKS = (
    ("four workers have begun", "start_ms"),
    ("a small task, workers that are used again", "task_ms"),
    ("a small task, each in a worker of its own", "fresh_ms"),
)
"""The rows about tasks, and the figure of each."""

TESTS = (
    ("`pytest`", "plain"),
    ("`pytest -n 4` (pytest-xdist)", "xdist"),
    ("`pytest --forkd TAG --forkd-workers 4`", "forks"),
    ("the same with `--forkd-fresh`", "fresh"),
)
"""The rows about tests, likewise."""

MACHINE = """\
Machine: {place}, {cpus}, {day}; medians of {rounds} rounds, by
`make bench ARGS="--only executor"`. The helper machine emulates its processor: **compare the
figures with each other, not with your host**.
"""


def outputs() -> dict[Path, str]:
    """Return the pages with their contents; nothing before the first measurement."""
    if not FIGURES.exists():
        return {}
    measured = json.loads(FIGURES.read_text(encoding="utf-8"))
    parts = {TASKS_PAGE: tasks(measured), TESTS_PAGE: tests(measured)}
    return {path: with_part(path.read_text(encoding="utf-8"), part) for path, part in parts.items()}


def with_part(page: str, part: str, first: str = BEGIN, last: str = END) -> str:
    """Return a page whose part between the lines `first` and `last` is replaced.

    Raises:
        ValueError: It has no place for it.
    """
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {first!r} and {last!r}")
    return f"{before}{first}\n{part}\n{last}{after}"


def tasks(measured: dict[str, Any]) -> str:
    """Return the table of tasks."""
    lines = ["| | forks | processes | forks / processes |", "|---|---:|---:|---:|"]
    for words, name in TASKS:
        figures = measured["executor"][name]
        cells = (ms(figures["forks"]), ms(figures["processes"]), f"{figures['ratio']:.2f}")
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _machine(measured, measured["executor"]["rounds"])])


def tests(measured: dict[str, Any]) -> str:
    """Return the table of tests."""
    found = measured["testing"]
    lines = [f"| {found['tests']} tests with | time | against `pytest` |", "|---|---:|---:|"]
    for words, name in TESTS:
        cells = (f"{found[f'{name}_s']:.1f} s", f"{found[f'{name}_ratio']:.2f}")
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _machine(measured, found["rounds"])])


def ms(value: float) -> str:
    """Return a time in words."""
    return f"{value:,.0f} ms"


def _machine(measured: dict[str, Any], rounds: int) -> str:
    day = measured["started_at"].partition("T")[0]
    cpus = f"{measured['cpus']} CPU{'' if measured['cpus'] == 1 else 's'}"
    return MACHINE.format(place=measured["place"], cpus=cpus, day=day, rounds=rounds)
