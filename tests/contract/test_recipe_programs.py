"""The programs of recipes run, and do what their pages say.

tests/functional/test_docs_machines.py runs them on real machines, too.
"""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.docs import ROOT, links, load_program
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemon import RunningDaemon

LINES_MAX = 90

PROGRAMS = sorted((ROOT / "recipes").glob("*/run.py"))


@pytest.fixture(autouse=True)
def _daemon_found_as_any_program_does(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.service.stored = some_snapshots("numpy")
    monkeypatch.setenv("FORKD_URL", daemon.url)


def test_every_recipe_has_a_page_that_the_list_leads_to() -> None:
    folders = {path.parent.name for path in (ROOT / "recipes").glob("*/*") if path.is_file()}
    listed = [target for target in links(ROOT / "recipes/README.md") if target[0] != "."]

    assert sorted(f"{name}/README.md" for name in folders) == sorted(listed)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.parent.name)
def test_a_program_is_short_and_its_page_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    page = (path.parent / "README.md").read_text(encoding="utf-8")
    command = f"python recipes/{path.parent.name}/run.py"

    assert len(text.splitlines()) <= LINES_MAX
    assert command in page
    assert command in (ast.get_docstring(ast.parse(text)) or "")


def test_a_speculating_agent_goes_on_from_the_best_branch(
    daemon: RunningDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    won = load_program(ROOT / "recipes/speculative-agent/run.py")["main"]()

    assert [name for name, _ in won] == ["nearest town first", "turn parts around"]
    assert won[1][1] < won[0][1] < math.inf
    assert "'visit half': inf, 'use a solver': inf" in capsys.readouterr().out
    assert daemon.service.running == {}


@pytest.mark.parametrize(("command", "kept"), [("true", True), ("exit 1", False)])
def test_a_coding_agent_keeps_the_first_patch_that_passes_or_none(
    daemon: RunningDaemon, command: str, *, kept: bool
) -> None:
    change = load_program(ROOT / "recipes/coding-agent-fork/run.py")["main"]("numpy", command)

    assert ("+    return title.lower().replace(' ', '-')" in change) is kept
    assert (change == "") is not kept
    assert daemon.service.running == {}


@pytest.mark.parametrize(
    ("snapshot", "ended", "last"),
    [
        ("numpy", "{'scores': [1, 3, 5], 'kept': 3723}", "kill_sandbox: {"),
        ("nowhere", "{'error': ", "spawn_sandboxes: no snapshot 'nowhere'"),
    ],
)
def test_an_agent_over_mcp_keeps_the_branch_that_reads_most_or_hears_why_not(
    daemon: RunningDaemon, snapshot: str, ended: str, last: str
) -> None:
    program = [sys.executable, str(ROOT / "recipes/mcp-agent/run.py"), snapshot]
    said = subprocess.run(program, capture_output=True, text=True, check=True).stdout  # noqa: S603 - ours

    *calls, end = said.splitlines()
    assert end.startswith(ended)
    assert calls[-1].startswith(last)
    assert daemon.service.running == {}
