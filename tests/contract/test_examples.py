"""The programs in examples/ run, and do what they show.

tests/functional/test_docs_machines.py runs them on real machines, too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.docs import EXAMPLES, load_example, notebook_code
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemon import RunningDaemon

LINES_MAX = 60

FILES = sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")])


@pytest.fixture(autouse=True)
def _daemon_found_as_any_program_does(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.service.stored = some_snapshots("numpy")
    monkeypatch.setenv("FORKD_URL", daemon.url)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_is_short_and_listed(path: Path) -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")

    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_MAX
    assert f"]({path.name})" in listed


def test_there_are_six() -> None:
    assert len(FILES) == 6


def test_a_model_sees_what_its_code_did(capsys: pytest.CaptureFixture[str]) -> None:
    answer = load_example("tool_loop")["main"]()

    assert answer == "The largest number is 3."
    assert "ZeroDivisionError: division by zero\n3" in capsys.readouterr().out


def test_the_best_of_all_attempts_is_kept(daemon: RunningDaemon) -> None:
    best, kept = load_example("best_of_n")["main"]()

    assert best == kept
    assert daemon.service.running == {}, "everything is removed at the end"


@pytest.mark.parametrize("command", ["true", "exit 3"])
def test_files_are_run_in_sandboxes_of_their_own(
    command: str, tmp_path: Path, daemon: RunningDaemon
) -> None:
    for name in ("test_one.py", "test_other.py", "helper.py"):
        (tmp_path / name).write_text("", encoding="utf-8")

    passed = load_example("parallel_tests")["main"](tmp_path, command)

    assert passed == dict.fromkeys(("test_one.py", "test_other.py"), command == "true")
    assert daemon.service.running == {}


def test_episodes_begin_anew() -> None:
    ends = load_example("episodes")["main"]()

    assert ends == {"always right": 5, "never decided": 0, "always left": -5}


def test_the_cells_of_the_notebook_run_from_top_to_bottom(daemon: RunningDaemon) -> None:
    names: dict[str, Any] = {}

    exec(compile(notebook_code(), "notebook", "exec"), names)  # noqa: S102 - our own example

    assert names["copy"].id != names["sandbox"].id
    assert daemon.service.running == {}


def test_the_notebook_is_one_without_outputs() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))

    assert notebook["nbformat"] == 4
    assert all(not cell.get("outputs") for cell in notebook["cells"])
