"""Run every suite where it can run, and say at the end what ran where.

A suite that fails does not keep later ones from running: one run shows all that
is broken.  Tests whose needs this host does not meet run in helper machines, and
only those, so that each test runs once.

There are *lanes*: functional tests that may change this host, and look at it before and after each,
the other functional tests, the other suites of this host, and each helper machine.  Two more of
them than the host has cores run at once, since each waits now and then.  Machines share their tests
as they go (`tests.machine.claims`), so that all lanes end at about the same time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools import junit

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "results"
UNMET = RESULTS / "unmet.txt"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
HOST = "host"
"""Marks the lines of what runs on this host, and changes it."""
ASIDE = "side"
"""Marks those of functional tests that leave it alone."""
BESIDE = "code"
"""Marks those of other suites that do."""
FUNCTIONAL = tuple(
    str(path.relative_to(ROOT))
    for path in map(ROOT.joinpath, ("tests/functional", "tests/security", "tests/upgrade"))
    if path.is_dir()
)
SLOWEST = ("--durations=10", "--durations-min=5")
"""Has pytest name the tests that would be worth shortening."""
MACHINES_MAX = 2
"""Most helper machines.

One that emulates its processor keeps a core of the host busy, and what runs on the host needs one.
"""
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
        apart: Whether its temporary files are in a folder of its own: the suite that looks for
            what its tests left in the usual one runs at the same time.
    """

    name: str
    place: str
    command: tuple[str, ...]
    junit: Path | None = None
    apart: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a suite went; counts are None where it has none."""

    suite: Suite
    passed: bool
    duration_s: float
    counts: tuple[int, int, int] | None


def on_this_host() -> list[Suite]:
    """Return the suites that change this host, and would see each other do that, in order."""
    return [
        _pytest(
            "functional",
            RESULTS / "native.xml",
            "--changing-host",
            *SLOWEST,
            *FUNCTIONAL,
            apart=False,
        ),
        Suite("Rust", "this host", ("make", "test-rust"), apart=False),
    ]


def leaving_host() -> list[Suite]:
    """Return the functional tests that leave this host alone."""
    options = ("--leaving-host", *SLOWEST)
    name = "functional, leaving the host"
    return [_pytest(name, RESULTS / "user.xml", *options, *FUNCTIONAL)]


def beside() -> list[Suite]:
    """Return the other suites that leave it alone, in order; first what Rust's tests need."""
    return [
        Suite("Rust, compiled", "this host", ("make", "compile-rust-tests")),
        _pytest("unit and contract", RESULTS / "unit.xml", "tests/unit", "tests/contract"),
        Suite("device fuzzing, seeded", "this host", ("make", "test-fuzz")),
        Suite("format, lint, types, layers", "this host", ("make", "static")),
    ]


def in_helper_machines(tests: list[str], cores: int, memory_gib: int, claims: Path) -> list[Suite]:
    """Return the suites that share tests, on a host with so many cores and so much memory."""
    of = min(MACHINES_MAX, len(tests), max(1, cores - 1), max(1, memory_gib // MACHINE_GIB))
    modules = sorted({test.partition("::")[0] for test in tests})
    return [_in_machine(number, of, claims, modules) for number in range(1, of + 1)]


def _pytest(name: str, results: Path, *arguments: str, apart: bool = True) -> Suite:
    return Suite(name, "this host", (*PYTEST, f"--junitxml={results}", *arguments), results, apart)


def _in_machine(number: int, of: int, claims: Path, modules: list[str]) -> Suite:
    results = RESULTS / f"machine-{number}.xml"
    command = (
        sys.executable, "-m", "tests.machine.run", "--claims", str(claims), "--sharers", str(of),
        "--junit", str(results), "-v", "--unmet-from", str(UNMET.relative_to(ROOT)),
        *SLOWEST, *modules,
    )  # fmt: skip
    name = f"needs KVM or root, {number} of {of}"
    return Suite(name, "helper machine", command, results)


def list_unmet() -> list[str]:
    """Return the tests that this host cannot run, and leave them in `UNMET`.

    If the tests cannot be collected there are none, and the suite that runs here will say why.
    Their bytecode, with pytest's assertions, is written on the way: helper machines read it, but
    cannot write it, and take half a minute each to make it.
    """
    command = (*PYTEST, "--collect-only", "--unmet-to", str(UNMET), *FUNCTIONAL)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True)  # noqa: S603 - ours
    return UNMET.read_text(encoding="utf-8").splitlines() if UNMET.exists() else []


def run_lanes(lanes: dict[str, list[Suite]], at_once: int) -> list[Outcome]:
    """Run the suites of each lane in order, so many lanes at once; returns them in order.

    What a lane prints has its name before every line.
    """

    def run_lane(mark: str) -> list[Outcome]:
        return [run(suite, f"{mark}| ") for suite in lanes[mark]]

    with ThreadPoolExecutor(at_once) as threads:
        return [outcome for lane in threads.map(run_lane, lanes) for outcome in lane]


def run(suite: Suite, mark: str = "") -> Outcome:
    """Run one suite, its output passing through with `mark` before each line."""
    _print(f"{mark}== {suite.name}, on {suite.place}\n")
    began_s = time.monotonic()
    if suite.junit is not None:
        suite.junit.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="unit-") as folder:
        Path(folder).chmod(0o1777)  # or programs of other users would use the usual folder
        status, output = _tee(suite.command, {"TMPDIR": folder} if suite.apart else {}, mark)
    counts = junit.counts(suite.junit) if suite.junit else counts_of_cargo(output)
    return Outcome(suite, status == 0, time.monotonic() - began_s, counts)


def _tee(command: tuple[str, ...], env: dict[str, str], mark: str) -> tuple[int, str]:
    lines = []
    with subprocess.Popen(  # noqa: S603 - ours
        command,
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout or ():
            _print(f"{mark}{line}")
            lines.append(line)
    return process.returncode, "".join(lines)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def counts_of_cargo(output: str) -> tuple[int, int, int] | None:
    """Return the sums of cargo's `test result` lines; None if there are none."""
    found = re.findall(r"test result: .*?(\d+) passed; (\d+) failed; (\d+) ignored", output)
    if not found:
        return None
    passed, failed, skipped = (sum(map(int, column)) for column in zip(*found, strict=True))
    return passed, failed, skipped


def left_out(unmet: list[str], junits: Iterable[Path]) -> list[str]:
    """Return the tests in `unmet` of which no file says what became of them."""
    ran = {name for path in junits for name in junit.taken_s(path)}
    return [name for name in unmet if name not in ran]


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
    unmet, cores = list_unmet(), len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    with tempfile.TemporaryDirectory(dir=RESULTS, prefix="claims-") as claims:
        machines = in_helper_machines(unmet, cores, memory_gib, Path(claims))
        lanes = {HOST: on_this_host(), ASIDE: leaving_host(), BESIDE: beside()}
        lanes |= {str(number): [suite] for number, suite in enumerate(machines, 1)}
        outcomes = run_lanes(lanes, cores + 2)
    missing = left_out(unmet, (suite.junit for suite in machines if suite.junit is not None))
    sys.stdout.write(f"\n{table(outcomes)}\n")
    files = [outcome.suite.junit for outcome in outcomes if outcome.suite.junit is not None]
    sys.stdout.writelines(f"failed: {each}\n" for path in files for each in junit.failed(path))
    sys.stdout.writelines(f"did not run: {name}\n" for name in missing)
    return 0 if all(outcome.passed for outcome in outcomes) and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
