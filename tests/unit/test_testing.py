"""The fixtures that are sandboxes, in a pytest of their own over a daemon in memory."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from forkd.errors import InvalidRequest
from forkd.testing import prepared
from tests.support.docs import ROOT, Block, blocks
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemon import RunningDaemon

PAGE = ROOT / "docs/howto/test-with-forks.md"


@pytest.fixture(autouse=True)
def environment(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.service.stored = some_snapshots("warm", "other")
    monkeypatch.setenv("FORKD_URL", daemon.url)
    monkeypatch.delenv("FORKD_TAG", raising=False)


def run_pytest(folder: Path, *args: str, code: int = 0) -> str:
    """Run the tests of a folder as a user does; return what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args]
    done = subprocess.run(  # noqa: S603 - our own interpreter
        command, capture_output=True, text=True, check=False, timeout=50, cwd=folder
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_each_test_has_a_sandbox_of_its_own(tmp_path: Path, daemon: RunningDaemon) -> None:
    (tmp_path / "test_it.py").write_text(
        "ids = set()\n\n"
        "def test_one(sandbox):\n    assert sandbox.tag == 'warm'\n    ids.add(sandbox.id)\n\n"
        "def test_two(sandbox):\n    assert sandbox.eval('1 + 1').value == 2\n"
        "    assert sandbox.id not in ids\n"
    )

    assert "2 passed" in run_pytest(tmp_path, "--forkd-tag", "warm")
    assert daemon.service.running == {}


def test_the_snapshot_can_be_named_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nforkd_tag = other\n")
    (tmp_path / "test_it.py").write_text("def test_it(sandbox):\n    assert sandbox.tag == 'other'")

    assert "1 passed" in run_pytest(tmp_path)


STATE = """
from forkd.testing import prepared

@prepared
def database(sandbox):
    sandbox.eval("rows = [1, 2]", check=True)
    with open("prepared", "a") as file:
        file.write("x")

@prepared(tag="other")
def another(sandbox):
    assert sandbox.tag == "other"

def test_one_test_changes_what_it_finds(database):
    assert database.eval("rows.append(3); rows").value == [1, 2, 3]

def test_another_test_does_not_see_that(database):
    assert database.eval("rows").value == [1, 2]

def test_a_state_can_have_a_snapshot_of_its_own(another, database):
    assert another.id != database.id
"""


def test_a_state_is_prepared_once_and_branched_for_each_test(
    tmp_path: Path, daemon: RunningDaemon
) -> None:
    (tmp_path / "test_it.py").write_text(STATE)

    assert "3 passed" in run_pytest(tmp_path, "--forkd-tag", "warm")
    assert (tmp_path / "prepared").read_text() == "x"
    assert daemon.service.running == {}


@pytest.mark.parametrize("block", blocks(PAGE, "python pytest"), ids=lambda block: str(block.line))
def test_the_tests_of_the_page_pass(block: Block, tmp_path: Path) -> None:
    (tmp_path / "test_page.py").write_text(block.code)

    assert "passed" in run_pytest(tmp_path, "--forkd-tag", "warm")


def test_a_state_that_cannot_be_prepared_is_tried_once(
    tmp_path: Path, daemon: RunningDaemon
) -> None:
    (tmp_path / "test_it.py").write_text(
        "from forkd.testing import prepared\n\n"
        "@prepared\ndef broken(sandbox):\n    print('trying', file=open('tries', 'a'))\n"
        "    raise LookupError('no schema')\n\n"
        "def test_one(broken):\n    pass\n\ndef test_two(broken):\n    pass\n"
    )

    said = run_pytest(tmp_path, "--forkd-tag", "warm", code=1)

    assert "2 errors" in said
    assert "LookupError: no schema" in said
    assert (tmp_path / "tries").read_text() == "trying\n"
    assert daemon.service.running == {}


def test_a_state_that_was_killed_is_prepared_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from forkd import Client\nfrom forkd.testing import prepared\n\n"
        "@prepared\ndef state(sandbox):\n    sandbox.eval('x = 1')\n\n"
        "def test_one(state):\n    for each in Client().sandboxes.list():\n        each.kill()\n\n"
        "def test_two(state):\n    assert state.eval('x').value == 1\n"
    )

    assert "2 passed" in run_pytest(tmp_path, "--forkd-tag", "warm")


def test_a_state_without_a_sandbox_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="database: a prepared state takes one argument"):

        @prepared  # type: ignore[arg-type]
        def database() -> None: ...


def test_a_session_that_asks_for_nothing_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n"
        "    assert 'forkd.testing.plugin' in sys.modules\n"
        "    assert not {'forkd.sdk', 'httpx', 'pydantic'} & set(sys.modules)\n"
    )

    assert "1 passed" in run_pytest(tmp_path)
