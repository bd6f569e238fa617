"""What the table at the end of `make test` counts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.machine.durations import durations_s
from tools.test_all import (
    Outcome,
    Suite,
    counts_of_cargo,
    counts_of_junit,
    in_helper_machines,
    run_at_once,
    table,
)

if TYPE_CHECKING:
    from pathlib import Path

JUNIT = """<testsuites>
<testsuite tests="7" failures="1" errors="1" skipped="2"></testsuite>
</testsuites>"""


def test_a_junit_file_says_what_passed_failed_and_was_skipped(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)

    assert counts_of_junit(tmp_path / "junit.xml") == (3, 2, 2)


def test_a_suite_that_ended_before_it_counted_has_no_counts(tmp_path: Path) -> None:
    (tmp_path / "empty.xml").touch()

    assert counts_of_junit(tmp_path / "empty.xml") is None
    assert counts_of_junit(tmp_path / "missing.xml") is None
    assert counts_of_cargo("error: could not compile") is None


def test_the_results_of_several_crates_add_up() -> None:
    line = "test result: ok. {} passed; {} failed; 1 ignored; 0 measured; 0 filtered out\n"

    assert counts_of_cargo(line.format(3, 0) + line.format(4, 2)) == (7, 2, 2)


def test_the_table_says_where_each_suite_ran_and_marks_failures() -> None:
    good = Outcome(
        Suite("unit", "this host", ("true",)), passed=True, duration_s=1.4, counts=(9, 0, 1)
    )
    bad = Outcome(
        Suite("functional", "helper machine", ("true",)), passed=False, duration_s=80, counts=None
    )

    _, first, second = table([good, bad]).splitlines()

    assert first.split() == ["unit", "this", "host", "9", "0", "1", "1s"]
    assert second.split() == ["functional", "helper", "machine", "-", "-", "-", "80s", "FAILED"]


def test_suites_run_at_once_and_each_line_says_whose_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    speak = ("sh", "-c", f"echo heard >{tmp_path}/pipe")  # goes on when somebody listens
    listen = ("sh", "-c", f"cat {tmp_path}/pipe; false")

    outcomes = run_at_once([Suite("speak", "here", speak), Suite("listen", "there", listen)])

    assert [outcome.passed for outcome in outcomes] == [True, False]
    printed = [line for line in capsys.readouterr().out.splitlines() if line]
    assert sorted(printed) == ["1| == speak, on here", "2| == listen, on there", "2| heard"]


def test_durations_are_those_of_the_tests_that_ran(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text("""<testsuites><testsuite>
        <testcase classname="tests.functional.test_vmm" name="test_a[1]" time="2.345" />
        <testcase classname="tests.functional.test_vmm" name="test_b"><skipped /></testcase>
    </testsuite></testsuites>""")

    assert durations_s(tmp_path / "junit.xml") == {"tests/functional/test_vmm.py::test_a[1]": 2.3}


@pytest.mark.parametrize(
    ("tests", "cores", "memory_gib", "machines"),
    [
        (143, 2, 23, 2),
        (143, 64, 500, 2),
        (143, 1, 23, 1),
        (143, 2, 15, 1),
        (143, 2, 3, 1),
        (1, 2, 23, 1),
        (0, 2, 23, 0),
    ],
)
def test_a_host_runs_as_many_helper_machines_as_it_has_cores_memory_and_tests_for(
    tests: int, cores: int, memory_gib: int, machines: int
) -> None:
    assert len(in_helper_machines(tests, cores, memory_gib)) == machines
