"""`pytest --forkd`: tests in forks end as they do without; the machines are the fake VMM's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.forked_daemon import with_snapshot
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.fake_daemon import FakeDaemon

TESTS = """
import os
import unittest
import pytest

@pytest.fixture(scope="module")
def number():
    yield 7

@pytest.fixture
def broken():
    raise LookupError("no fixture")

@pytest.fixture
def torn():
    yield
    raise LookupError("no end")

def test_passes(number):
    print("said in a test")
    assert number == 7

def test_fails(number):
    assert number == 8, "seven is not eight"

@pytest.mark.parametrize("value", [1, 2])
def test_values(value):
    assert value

def test_has_an_error(broken):
    pass

def test_has_an_error_afterwards(torn):
    pass

@pytest.mark.skip(reason="not today")
def test_is_skipped():
    pass

@pytest.mark.xfail(reason="known")
def test_is_known_to_fail():
    assert False

@pytest.mark.xfail
def test_passes_all_the_same():
    pass

class TestParts(unittest.TestCase):
    def test_parts(self):
        for number in range(3):
            with self.subTest("part", number=number):
                assert number != 1

class TestClass:
    def test_method(self, tmp_path, monkeypatch):
        monkeypatch.setenv("X", "1")
        (tmp_path / "x").write_text("x")

def test_says_where_it_runs(record_property):
    record_property("pid", os.getpid())
"""

OTHER = """
def test_in_another_module():
    pass

def test_is_left_out():
    raise AssertionError
"""

DEADLY = """
import os
import signal
from pathlib import Path

def test_before():
    pass

def test_ends_its_machine():
    if "FORKD_URL" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    pass
"""

ALONE = """
import pytest

seen = []

@pytest.mark.parametrize("number", range(4))
def test_sees_no_other(number):
    seen.append(number)
    assert seen == [number]
"""

CONFTEST = """
import json
import os

def pytest_runtest_logreport(report):
    if "TOLD" in os.environ:
        members = ("nodeid", "when", "outcome", "longreprtext", "capstdout", "wasxfail", "location")
        said = {each: getattr(report, each, None) for each in members}
        said["properties"] = dict(report.user_properties)
        with open(os.environ["TOLD"], "a") as file:
            file.write(json.dumps(said) + "\\n")
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    """A daemon with a snapshot that has been forked."""
    with with_snapshot(tmp_path_factory.mktemp("host")) as daemon:
        yield daemon


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_one.py").write_text(TESTS)
    (folder / "test_other.py").write_text(OTHER)
    return folder


def run_pytest(daemon: FakeDaemon, project: Path, *args: str) -> tuple[int, str, list[Any]]:
    """Return the exit code, what was printed, and what was told of each test."""
    told = project.parent / "told"
    told.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", *args]
    done = subprocess.run(  # noqa: S603 - our own interpreter
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=project,
        env={**os.environ, "FORKD_URL": daemon.url, "TOLD": str(told)},
    )
    lines = told.read_text().splitlines() if told.exists() else []
    assert daemon.http.get("/v2/sandboxes").json() == []
    return done.returncode, done.stdout + done.stderr, [json.loads(each) for each in lines]


def in_forks(project: Path, *more: str) -> list[str]:
    """Return the options with which the fake machines, which see our files, run a project."""
    return ["--forkd", TAG, "--forkd-path", str(project), "--forkd-workers", "2", *more]


def pids(told: list[Any]) -> set[int]:
    return {each["properties"].pop("pid") for each in told if "pid" in each["properties"]}


@pytest.mark.parametrize("more", [("-k", "not left_out"), ("-x",)])
def test_tests_in_forks_end_as_they_do_without(
    more: tuple[str, ...], daemon: FakeDaemon, project: Path
) -> None:
    expected_code, _, expected = run_pytest(daemon, project, *more)
    code, said, told = run_pytest(daemon, project, *in_forks(project, *more))

    here, there = pids(expected), pids(told)
    assert told == expected, said
    assert (code, len(told) > 0, here & there) == (expected_code, True, set())


def test_a_test_that_ends_its_machine_is_an_error_and_the_rest_go_on(
    daemon: FakeDaemon, project: Path
) -> None:
    (project / "test_deadly.py").write_text(DEADLY)

    code, said, told = run_pytest(daemon, project, *in_forks(project, "test_deadly.py"))

    ends = [(each["nodeid"].partition("::")[2], each["when"], each["outcome"]) for each in told]
    assert [each for each in ends if each[1] != "teardown"] == [
        ("test_before", "setup", "passed"),
        ("test_before", "call", "passed"),
        ("test_ends_its_machine", "setup", "failed"),
        ("test_after", "setup", "passed"),
        ("test_after", "call", "passed"),
    ]
    assert "the task was lost with its sandbox" in said
    assert "2 passed, 1 error" in said
    assert code == 1


@pytest.mark.parametrize(("more", "ends"), [((), 1), (("--forkd-fresh",), 0)])
def test_each_test_has_a_fork_of_its_own_if_asked(
    more: tuple[str, ...], ends: int, daemon: FakeDaemon, project: Path
) -> None:
    (project / "test_alone.py").write_text(ALONE)

    code, said, _ = run_pytest(daemon, project, *in_forks(project, "test_alone.py", *more))

    assert code == ends, said


def test_a_test_with_a_sandbox_of_its_own_runs_here(daemon: FakeDaemon, project: Path) -> None:
    (project / "test_here.py").write_text(
        "import os\n\ndef test_here(sandbox):\n    assert sandbox.eval('answer').value == 42\n"
        "    assert 'TOLD' in os.environ\n\n"
        "def test_there():\n    assert 'TOLD' not in os.environ\n"
    )

    code, said, _ = run_pytest(
        daemon, project, *in_forks(project, "test_here.py", "--forkd-tag", TAG)
    )

    assert code == 0, said


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--forkd", "nothing"], "no snapshot 'nothing'"),
        (["--forkd", TAG, "--pdb"], "--pdb and --forkd exclude each other"),
        (["--forkd", TAG, "--forkd-workers", "0"], "--forkd-workers: is from 1 to 200, not 0"),
        (["--forkd", TAG, "--forkd-workers", "201"], "--forkd-workers: is from 1 to 200, not 201"),
        (["--forkd", TAG, "--forkd-path", "/no/where"], "/no/where"),
        (["--forkd", TAG, "--forkd-path", ".", "--forkd-with", "nope"], "nope is not installed"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(
    args: list[str], words: str, daemon: FakeDaemon, project: Path
) -> None:
    code, said, told = run_pytest(daemon, project, "test_other.py", *args)

    assert words in said
    assert (code, told) == (4, [])
