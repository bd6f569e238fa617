"""Recipes whose forks run tests, over the fake VMM; test_recipe_machines.py has real machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.docs import ROOT
from tests.support.forked_daemon import with_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fake_daemon import FakeDaemon

PYTEST = ROOT / "recipes/pytest"
CI = ROOT / "recipes/ci-parallel-pytest"

FORKD = """\
#!/bin/sh
echo "$@" >>"$CALLS"
[ "$2" = create ] || [ -e "$CALLS.made" ] || exit 3
touch "$CALLS.made"
"""
"""A command line whose one snapshot exists once it was created."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    """A daemon with a snapshot that has been forked."""
    with with_snapshot(tmp_path_factory.mktemp("host"), "tests") as daemon:
        yield daemon


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    bin_dir = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}", **variables}
    return subprocess.run(  # noqa: S603 - our own
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment
    )


@pytest.mark.parametrize(
    ("more", "said"), [(("--forkd-fresh",), "6 passed"), ((), "2 failed, 4 passed")]
)
def test_the_tests_of_the_recipe_pass_each_in_a_fork_of_its_own(
    more: tuple[str, ...], said: str, daemon: FakeDaemon
) -> None:
    project = PYTEST / "project"
    options = ["-p", "no:cacheprovider", "--capture=sys", "--forkd-workers", "1"]
    forks = ["--forkd", "tests", "--forkd-path", str(project), *more]

    ended = run(["pytest", *options, *forks], project, FORKD_URL=daemon.url)

    assert said in ended.stdout, ended.stdout + ended.stderr


def test_the_warm_up_collects_the_tests_and_runs_those_that_it_is_asked_for() -> None:
    code = (PYTEST / "warmup.py").read_text().replace("/srv/project", str(PYTEST / "project"))
    asked = (
        "\nassert 'shop' in __import__('sys').modules\n"
        "assert run('test_prices.py::test_nothing_costs_nothing') == "
        "{'test_prices.py::test_nothing_costs_nothing': 'passed'}\n"
        "assert sorted(run().values()) == ['failed'] * 2 + ['passed'] * 4\n"
        "try:\n    run('test_none.py')\nexcept LookupError as error:\n    print('ended:', error)\n"
    )

    ended = run([sys.executable, "-B", "-c", code + asked], PYTEST)

    assert "ended: pytest ended with <ExitCode.USAGE_ERROR" in ended.stdout, ended.stderr


def test_a_snapshot_of_tests_that_cannot_be_collected_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    code = (PYTEST / "warmup.py").read_text().replace("/srv/project", str(tmp_path))

    ended = run([sys.executable, "-B", "-c", code], PYTEST)

    assert f"RuntimeError: the tests in {tmp_path} cannot be collected" in ended.stderr


def test_an_environment_that_is_not_whole_is_not_made(tmp_path: Path) -> None:
    whole = (CI / "warmup.py").read_text().replace("/srv/check", str(CI / "check"))
    (tmp_path / "test_broken.py").write_text("def test_it():\n    assert not 'whole'\n")
    broken = (CI / "warmup.py").read_text().replace("/srv/check", str(tmp_path))

    assert run([sys.executable, "-B", "-c", whole], CI).returncode == 0
    assert "RuntimeError: the environment is not whole" in (
        run([sys.executable, "-B", "-c", broken], CI).stderr
    )


@pytest.mark.soak(only=True)
def test_a_job_makes_its_snapshot_once_and_runs_the_tests_in_forks(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    (tmp_path / "forkd").write_text(FORKD)
    (tmp_path / "forkd").chmod(0o755)
    (tmp_path / "project").mkdir()
    for each in (CI / "project").glob("*.*"):
        (tmp_path / "project" / each.name).write_bytes(each.read_bytes())
    path = f"{tmp_path}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    job = [str(CI / "job.sh"), "project", "--forkd-path", str(tmp_path / "project")]
    calls = tmp_path / "calls"
    given = {"FORKD_URL": daemon.url, "PATH": path, "CALLS": str(calls), "WORKERS": "1"}

    for _ in range(2):  # whose snapshot has a name of its own, which the fake one has not
        ended = run(["sh", *job, "--forkd", "tests", "--capture=sys"], tmp_path, **given)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    tag = calls.read_text().split()[2]
    assert calls.read_text().splitlines() == [
        f"snapshot show {tag}",
        f"snapshot create {tag} --recipe {CI}",
        f"snapshot show {tag}",
    ]
    assert 'tests="24"' in (tmp_path / "project/report.xml").read_text()
