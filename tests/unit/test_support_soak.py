"""Which tests are in every run, and which in a soak alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import pytest

@pytest.mark.soak
def test_short(): ...

@pytest.mark.soak(only=True)
def test_long(): ...

@pytest.mark.soak
@pytest.mark.parametrize("case", ["quick", pytest.param("slow", marks=pytest.mark.soak(only=True))])
def test_both(case): ...
"""


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], ["test_short", "test_both[quick]"]),
        (["--long"], ["test_short", "test_long", "test_both[quick]", "test_both[slow]"]),
        (["--soak"], ["test_short", "test_long", "test_both[quick]", "test_both[slow]"]),
    ],
)
def test_what_is_marked_only_is_in_a_soak_alone(
    tmp_path: Path, options: list[str], found: list[str]
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    plugin = ["-p", "tests.support.soak", "-c", "/dev/null", f"--rootdir={tmp_path}"]
    listed = subprocess.run(  # noqa: S603 - ours
        [*command, *plugin, *options, str(tmp_path)],
        cwd=ROOT,
        # None of the installed plugins is needed; they load slowly.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    ids = [line for line in listed.stdout.splitlines() if "::" in line]
    assert [each.partition("::")[2] for each in ids] == found
