"""Compare tests in forks with tests in processes: pytest by itself, with xdist, with `--forkd`.

    python -m benchmarks.testing TAG        prints the figures; the daemon is that of `Client()`

`make bench ARGS='--only executor'` measures over real machines, beside what `benchmarks.executor`
compares, and writes the figures of docs/howto/test-with-forks.md.

The tests are written for this: `TESTS` in all, in `MODULES` modules which import numpy.  Each
computes for some milliseconds of a real processor.  Every figure is the time of a whole run of
pytest, from its start to its end:

| figure | how |
|---|---|
| `plain_s` | `pytest` |
| `xdist_s` | `pytest -n 4`, by pytest-xdist |
| `forks_s` | `pytest --forkd TAG --forkd-workers 4` |
| `fresh_s` | the same with `--forkd-fresh`: each test in a fork of its own |
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.harness import Json

ROOT = Path(__file__).resolve().parent.parent

TOOLS = ROOT / "build/bench-tools"
"""Where `make bench` has pytest-xdist."""

MODULES = 4
TESTS = 60

WORKERS = 4

ROUNDS = 2
ROUNDS_QUICK = 1
"""How often each run is taken."""

MODULE = """\
import numpy as np
import pytest


@pytest.mark.parametrize("number", range({tests}))
def test_sums(number):
    for side in range(1, 1000):
        assert np.full(side, number).sum() == side * number
"""


def ways(tag: str) -> Mapping[str, Sequence[str]]:
    """Return the options of each way to run the tests.

    Each loads its own plugin alone: what else is installed here would only take time.
    """
    forks = ("-p", "forkd.testing.plugin", "--forkd", tag, "--forkd-workers", str(WORKERS))
    return {
        "plain_s": (),
        "xdist_s": ("-p", "xdist", "-n", str(WORKERS)),
        "forks_s": forks,
        "fresh_s": (*forks, "--forkd-fresh"),
    }


STEPS = 4
"""How many ways there are."""


def measure(
    tag: str, url: str | None, rounds: int = ROUNDS, tell: Callable[[str], object] = str
) -> Json:
    """Return the median time of each way, and how often the plain run's time it is.

    Args:
        tag: A snapshot with numpy.
        url: Of the daemon; None as `Client()`.
        rounds: How often each is taken.
        tell: Is told what begins, `STEPS` times.

    Raises:
        EngineError: A run did not end with all tests passed.
    """
    times: dict[str, list[float]] = {name: [] for name in ways(tag)}
    with tempfile.TemporaryDirectory(prefix="forkd-bench-tests-") as folder:
        project = Path(folder)
        write(project)
        for number in range(rounds):
            for name, options in ways(tag).items():
                if number == 0:
                    tell(f"a run of tests, {name}")
                times[name].append(run_s(project, options, url))
    return {"tests": TESTS, "workers": WORKERS, "rounds": rounds, **compared(times)}


def compared(times: Mapping[str, Sequence[float]]) -> Json:
    """Return the median of each way, and the ratio of each to the plain one."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    plain_s = medians["plain_s"]
    ratios = {f"{name[:-2]}_ratio": taken_s / plain_s for name, taken_s in medians.items()}
    return {**medians, **ratios}


def write(project: Path) -> None:
    """Write the tests."""
    (project / "pytest.ini").write_text("[pytest]\n")
    for number in range(MODULES):
        text = MODULE.format(tests=TESTS // MODULES)
        (project / f"test_{number}.py").write_text(text)


def run_s(project: Path, options: Sequence[str], url: str | None) -> float:
    """Return how long one run takes.

    Raises:
        EngineError: It did not end with all tests passed.
    """
    words = ["-q", "-p", "no:cacheprovider"]
    environment = {
        **os.environ,
        **({} if url is None else {"FORKD_URL": url}),
        "PYTHONPATH": os.pathsep.join((str(TOOLS), str(ROOT / "src"))),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    began = time.perf_counter()
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-m", "pytest", *words, *options],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    taken_s = time.perf_counter() - began
    if done.returncode != 0 or f"{TESTS} passed" not in done.stdout:
        raise EngineError(f"pytest {' '.join(options)} failed: {done.stdout}{done.stderr}")
    return taken_s


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tag", help="a snapshot with numpy, and this program's Python")
    found = measure(parser.parse_args().tag, None)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
