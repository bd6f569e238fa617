"""How machines share the modules of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.machine.claims import DURATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]

KNOWN_S = {"tests/test_short.py": 1, "tests/test_long.py": 9, "tests/test_other.py": 5}

CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def once(tmp_path_factory):
    return tmp_path_factory.mktemp("made", numbered=False)
"""

MODULE = """
def test_first(once): pass
def test_second(once): pass
"""


@pytest.fixture
def run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[], list[str]]:
    """Runs one more machine, and returns what it ran; there is a module that nobody has timed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # none is needed; they load slowly
    files = dict.fromkeys((*KNOWN_S, "tests/test_new.py"), MODULE)
    for path, text in {
        **files,
        "conftest.py": CONFTEST,
        str(DURATIONS): json.dumps(KNOWN_S),
    }.items():
        (pytester.path / path).parent.mkdir(parents=True, exist_ok=True)
        (pytester.path / path).write_text(text)
    claims = tmp_path / "claims"
    claims.mkdir()

    def run() -> list[str]:
        options = ["-p", "tests.machine.claims", f"--claims={claims}", "-v"]
        result = pytester.runpytest_subprocess(*options)
        assert result.ret == 0
        return [line.split()[0] for line in result.outlines if " PASSED " in line]

    return run


def test_what_takes_longest_or_nobody_has_timed_comes_first_and_fixtures_of_the_run_stay(
    run: Callable[[], list[str]],
) -> None:
    order = ("new", "long", "other", "short")
    tests = [f"tests/test_{name}.py::test_{each}" for name in order for each in ("first", "second")]

    assert run() == tests
    assert run() == []


def test_a_module_that_another_machine_has_claimed_is_passed_over(
    run: Callable[[], list[str]], tmp_path: Path
) -> None:
    for name in ("new", "long", "short"):
        (tmp_path / "claims" / f"tests.test_{name}.py").mkdir()

    assert run() == ["tests/test_other.py::test_first", "tests/test_other.py::test_second"]


def test_modules_that_belong_together_are_claimed_as_one_with_the_time_of_both(
    run: Callable[[], list[str]], pytester: pytest.Pytester, tmp_path: Path
) -> None:
    mark = "import pytest\npytestmark = pytest.mark.together('pair')\n"
    for name in ("other", "short"):
        path = pytester.path / f"tests/test_{name}.py"
        path.write_text(mark + path.read_text())
    (pytester.path / DURATIONS).write_text(json.dumps({**KNOWN_S, "tests/test_short.py": 5}))

    order = [test.partition("::")[0] for test in run()]

    assert order == [
        f"tests/test_{name}.py" for name in ("new", "other", "short", "long") for _ in "12"
    ]
    claims = {path.name for path in (tmp_path / "claims").iterdir()}
    assert claims == {"pair", "tests.test_new.py", "tests.test_long.py"}
