"""What the table at the end of `make test` counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.machine.durations import of_modules
from tools import junit
from tools.test_all import (
    Outcome,
    Suite,
    counts_of_cargo,
    in_helper_machines,
    left_out,
    run_lanes,
    table,
)

JUNIT = """<testsuites>
<testsuite tests="7" failures="1" errors="1" skipped="2"></testsuite>
</testsuites>"""


def test_a_junit_file_says_what_passed_failed_and_was_skipped(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)

    assert junit.counts(tmp_path / "junit.xml") == (3, 2, 2)


def test_a_test_that_failed_is_named_with_the_first_line_of_its_reason(tmp_path: Path) -> None:
    cases = '<testcase classname="tests.unit.test_a" name="test_good" time="1"/>'
    cases += (
        '<testcase classname="tests.unit.test_a" name="test_b[x]">'
        '<failure message="assert 1 == 2&#10; +more">trace</failure></testcase>'
        '<testcase classname="tests.unit.test_a" name="test_c"><error>trace</error></testcase>'
    )
    (tmp_path / "junit.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")

    assert junit.failed(tmp_path / "junit.xml") == [
        "tests/unit/test_a.py::test_b[x]: assert 1 == 2",
        "tests/unit/test_a.py::test_c: no reason given",
    ]
    assert junit.failed(tmp_path / "missing.xml") == []


def test_a_test_of_a_class_has_pytests_own_id(tmp_path: Path) -> None:
    cases = '<testcase classname="tests.functional.test_a" name="test_b[x.y]" time="1"/>'
    cases += '<testcase classname="tests.functional.test_a.TestC" name="test_d" time="2"/>'
    (tmp_path / "junit.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")

    assert junit.taken_s(tmp_path / "junit.xml") == {
        "tests/functional/test_a.py::test_b[x.y]": 1,
        "tests/functional/test_a.py::TestC::test_d": 2,
    }


def test_a_suite_that_ended_before_it_counted_has_no_counts(tmp_path: Path) -> None:
    (tmp_path / "empty.xml").touch()

    assert junit.counts(tmp_path / "empty.xml") is None
    assert junit.counts(tmp_path / "missing.xml") is None
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


def test_lanes_run_at_once_each_in_order_and_each_line_says_whose_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    speak = Suite("speak", "here", ("sh", "-c", f"echo heard >{tmp_path}/pipe"))  # to who listens
    listen = Suite("listen", "there", ("sh", "-c", f"cat {tmp_path}/pipe; false"))
    end = Suite("end", "here", ("true",))

    outcomes = run_lanes({"a": [speak, end], "b": [listen]}, at_once=2)

    assert [(each.suite.name, each.passed) for each in outcomes] == [
        ("speak", True),
        ("end", True),
        ("listen", False),
    ]
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("a")] == [
        "a| == speak, on here",
        "a| == end, on here",
    ]
    assert [line for line in printed if line.startswith("b")] == [
        "b| == listen, on there",
        "b| heard",
    ]


def test_a_lane_begins_when_another_has_ended_where_there_are_fewer_cores(tmp_path: Path) -> None:
    made = tmp_path / "made"
    lanes = {
        "a": [Suite("make", "here", ("mkdir", str(made)))],
        "b": [Suite("remove", "here", ("rmdir", str(made)))],
        "c": [Suite("make again", "here", ("mkdir", str(made)))],
    }

    assert all(outcome.passed for outcome in run_lanes(lanes, at_once=1))


CASES = """<testsuites><testsuite tests="3">
    <testcase classname="tests.functional.test_vmm" name="test_a[1]" time="2.345" />
    <testcase classname="tests.functional.test_vmm" name="test_b" time="1.3" />
    <testcase classname="tests.functional.test_disks" name="test_c"><skipped /></testcase>
</testsuite></testsuites>"""


def test_the_durations_of_a_module_are_those_of_its_tests_in_every_machine(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.xml").write_text(CASES)

    assert of_modules(tmp_path.iterdir()) == {
        "tests/functional/test_vmm.py": 7,
        "tests/functional/test_disks.py": 0,
    }


def test_a_test_of_which_no_machine_says_anything_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "1.xml").write_text(CASES)
    (tmp_path / "2.xml").touch()
    wanted = ["tests/functional/test_vmm.py::test_a[1]", "tests/functional/test_disks.py::test_c"]
    lost = "tests/functional/test_vmm.py::test_d"

    assert left_out([*wanted, lost], tmp_path.iterdir()) == [lost]


@pytest.mark.parametrize(
    ("tests", "cores", "memory_gib", "machines"),
    [
        (143, 3, 23, 2),
        (143, 64, 500, 2),
        (143, 2, 23, 1),
        (143, 1, 23, 1),
        (143, 3, 15, 1),
        (143, 3, 3, 1),
        (1, 3, 23, 1),
        (0, 2, 23, 0),
    ],
)
def test_a_host_runs_as_many_helper_machines_as_it_has_cores_memory_and_tests_for(
    tests: int, cores: int, memory_gib: int, machines: int
) -> None:
    names = [f"tests/functional/test_vmm.py::test_{number}" for number in range(tests)]

    assert len(in_helper_machines(names, cores, memory_gib, Path("claims"))) == machines
