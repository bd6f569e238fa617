"""Run every suite where it can run, and say at the end what ran where.

A suite that fails does not keep later ones from running: one run shows all that
is broken.  Tests whose needs this host does not meet run in the helper machine,
and only those, so that each test runs once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "results"
UNMET = RESULTS / "unmet.txt"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
FUNCTIONAL = tuple(
    str(path.relative_to(ROOT))
    for path in map(ROOT.joinpath, ("tests/functional", "tests/security", "tests/upgrade"))
    if path.is_dir()
)
SLOWEST = ("--durations=10", "--durations-min=5")
"""Has pytest name the tests that would be worth shortening."""
MACHINES_MAX = 2
"""Most helper machines at once; one that emulates its processor keeps one core of the host busy."""
MACHINE_GIB = 8
"""How much of the host's memory there must be for each of them, in GiB."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Something to run.

    Attributes:
        name: As the table shows it.
        place: Where it runs.
        command: How.
        junit: What it leaves its counts in; None if it prints them as cargo does.
    """

    name: str
    place: str
    command: tuple[str, ...]
    junit: Path | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a suite went; counts are None where it has none."""

    suite: Suite
    passed: bool
    duration_s: float
    counts: tuple[int, int, int] | None


def on_this_host() -> list[Suite]:
    """Return the suites that run here, in order, quick ones first."""
    native = RESULTS / "native.xml"
    return [
        Suite("format, lint, types, layers", "this host", ("make", "static")),
        Suite("Rust", "this host", ("make", "test-rust")),
        Suite("device fuzzing, seeded", "this host", ("make", "test-fuzz")),
        _pytest("unit and contract", RESULTS / "unit.xml", "tests/unit", "tests/contract"),
        _pytest("functional", native, "--unmet-to", str(UNMET), *SLOWEST, *FUNCTIONAL),
    ]


def in_helper_machines(tests: int, cores: int, memory_gib: int) -> list[Suite]:
    """Return the suites that run so many tests, all at once, on a host with so much of each."""
    of = min(MACHINES_MAX, tests, cores, max(1, memory_gib // MACHINE_GIB))
    return [_in_machine(number, of) for number in range(1, of + 1)]


def _pytest(name: str, junit: Path, *arguments: str) -> Suite:
    return Suite(name, "this host", (*PYTEST, f"--junitxml={junit}", *arguments), junit)


def _in_machine(number: int, of: int) -> Suite:
    junit = RESULTS / f"machine-{number}.xml"
    command = (
        sys.executable, "-m", "tests.machine.run", "--part", f"{number}/{of}",
        "--junit", str(junit), "-v", "--unmet-from", str(UNMET.relative_to(ROOT)),
        *SLOWEST, *FUNCTIONAL,
    )  # fmt: skip
    name = f"needs KVM or root, {number} of {of}"
    return Suite(name, "helper machine", command, junit)


def run_at_once(suites: list[Suite]) -> list[Outcome]:
    """Run suites at once; what each prints has its number before every line."""
    marks = [f"{number}| " for number in range(1, len(suites) + 1)]
    with ThreadPoolExecutor(MACHINES_MAX) as threads:
        return list(threads.map(run, suites, marks))


def run(suite: Suite, mark: str = "") -> Outcome:
    """Run one suite, its output passing through with `mark` before each line."""
    _print(f"\n{mark}== {suite.name}, on {suite.place}\n")
    began_s = time.monotonic()
    if suite.junit is not None:
        suite.junit.unlink(missing_ok=True)
    if suite.junit is not None and not mark:
        status, output = subprocess.run(suite.command, cwd=ROOT, check=False).returncode, ""  # noqa: S603 - ours
    else:
        status, output = _tee(suite.command, mark)
    counts = counts_of_junit(suite.junit) if suite.junit else counts_of_cargo(output)
    return Outcome(suite, status == 0, time.monotonic() - began_s, counts)


def _tee(command: tuple[str, ...], mark: str) -> tuple[int, str]:
    lines = []
    with subprocess.Popen(  # noqa: S603 - ours
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            _print(f"{mark}{line}")
            lines.append(line)
    return process.returncode, "".join(lines)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def counts_of_junit(path: Path) -> tuple[int, int, int] | None:
    """Return how many tests passed, failed and were skipped; None without a file."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    total = failed = skipped = 0
    for suite in ET.parse(path).getroot().iter("testsuite"):  # noqa: S314 - pytest wrote it
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return total - failed - skipped, failed, skipped


def counts_of_cargo(output: str) -> tuple[int, int, int] | None:
    """Return the sums of cargo's `test result` lines; None if there are none."""
    found = re.findall(r"test result: .*?(\d+) passed; (\d+) failed; (\d+) ignored", output)
    if not found:
        return None
    passed, failed, skipped = (sum(map(int, column)) for column in zip(*found, strict=True))
    return passed, failed, skipped


def table(outcomes: list[Outcome]) -> str:
    """Return what ran where, one line each."""
    lines = [f"{'suite':32}{'where':16}{'passed':>7}{'failed':>7}{'skipped':>8}{'time':>8}"]
    for outcome in outcomes:
        counts = outcome.counts or (("ok" if outcome.passed else "-"), "-", "-")
        numbers = f"{counts[0]:>7}{counts[1]:>7}{counts[2]:>8}"
        verdict = "" if outcome.passed else "  FAILED"
        lines.append(
            f"{outcome.suite.name:32}{outcome.suite.place:16}{numbers}"
            f"{outcome.duration_s:>7.0f}s{verdict}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run all suites, print the table; fail if any did."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    UNMET.unlink(missing_ok=True)
    for old in RESULTS.glob("machine-*.xml"):
        old.unlink()
    outcomes = [run(suite) for suite in on_this_host()]
    unmet = UNMET.read_text(encoding="utf-8").splitlines() if UNMET.exists() else []
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    suites = in_helper_machines(len(unmet), len(os.sched_getaffinity(0)), memory_gib)
    outcomes += run_at_once(suites)
    sys.stdout.write(f"\n{table(outcomes)}\n")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
