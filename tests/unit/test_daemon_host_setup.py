"""`forkd-daemon host` changes only what it has shown, for whom may, and says what it did."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from forkd.daemon.host_setup import commands
from forkd.errors import InvalidRequest
from forkd.host import tuning
from forkd.host.tuning import Seen

if TYPE_CHECKING:
    from pathlib import Path

SHMEM = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
WRONG = Seen(values={"vm.overcommit_memory": "2", SHMEM: "never"})
FILES = ["etc/sysctl.d/90-forkd.conf", "etc/tmpfiles.d/forkd.conf"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of an image of a host, on a host on which two settings are wrong."""
    (tmp_path / "var/lib").mkdir(parents=True)
    monkeypatch.setattr(tuning, "look", lambda: WRONG)
    return tmp_path


def run(*words: str) -> tuple[int, str]:
    """Run a command to which nobody can answer; return its status and what it says."""
    done = CliRunner().invoke(commands, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def said(*words: str) -> Any:  # noqa: ANN401 - JSON
    status, text = run(*words, "--json")
    return status, json.loads(text)


def written(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text(encoding="utf-8")
        for path in sorted((root / "etc").rglob("*"))
        if path.is_file()
    }


def test_every_change_is_shown_made_and_taken_back(root: Path) -> None:
    status, text = run("setup", f"--dir={root}", "--yes")

    assert status == 0
    assert list(written(root)) == FILES
    for content in written(root).values():
        assert all(f"  {line}\n" in text for line in content.splitlines())
    assert "write /etc/sysctl.d/90-forkd.conf: sets vm.overcommit_memory at each start" in text
    assert text.endswith("set up; `forkd host undo` takes it back\n")

    status, text = run("undo", f"--dir={root}", "--yes")
    assert status == 0
    assert "take back: /etc/tmpfiles.d/forkd.conf\n" in text
    assert text.endswith("\ntaken back\n")
    assert [path.relative_to(root) for path in root.rglob("*")] == [
        (root / "var").relative_to(root),
        (root / "var/lib").relative_to(root),
    ]


def test_what_is_done_already_is_said_so(root: Path) -> None:
    assert run("undo", f"--dir={root}") == (
        0,
        "nothing to undo: `forkd host setup` has changed nothing here\n",
    )
    run("setup", f"--dir={root}", "--yes")

    assert run("setup", f"--dir={root}") == (0, "nothing to change: this host is set up\n")


@pytest.mark.parametrize("command", ["setup", "undo"])
def test_a_dry_run_shows_and_changes_nothing(root: Path, command: str) -> None:
    if command == "undo":
        run("setup", f"--dir={root}", "--yes")
    before = written(root)

    status, text = run(command, f"--dir={root}", "--dry-run")

    assert (status, written(root)) == (0, before)
    assert "/etc/sysctl.d/90-forkd.conf" in text
    assert said(command, f"--dir={root}", "--dry-run")[1]["done"] == []


def test_what_was_done_is_said_as_json(root: Path) -> None:
    status, document = said("setup", f"--dir={root}", "--yes")

    assert status == 0
    assert {key: document[key] for key in ("done", "refused", "left")} == {
        "done": [f"/{name}" for name in FILES],
        "refused": {},
        "left": {},
    }
    first = document["changes"][0]
    assert (first["part"], first["kind"]) == (f"/{FILES[0]}", "file")
    assert "vm.overcommit_memory = 0\n" in first["wanted"]["text"]


def test_what_is_left_or_refused_is_named(root: Path) -> None:
    (root / "etc").mkdir()
    (root / "etc/tmpfiles.d").write_text("no folder", encoding="utf-8")

    status, text = run("setup", f"--dir={root}", "--yes")
    assert status == 1
    assert f"refused: /{FILES[1]}: cannot make the folder" in text
    assert "not all was set up" in text

    (root / FILES[0]).write_text("mine", encoding="utf-8")
    status, text = run("undo", f"--dir={root}", "--yes")
    assert status == 0
    assert f"left: /{FILES[0]}: it was changed since\n" in text


@pytest.mark.parametrize("words", [(), ("--json",)])
@pytest.mark.parametrize("command", ["setup", "undo"])
def test_nothing_changes_where_nobody_can_be_asked(
    root: Path, command: str, words: tuple[str, ...]
) -> None:
    if command == "undo":
        run("setup", f"--dir={root}", "--yes")
    before = written(root)

    with pytest.raises(InvalidRequest, match="give --yes, or --dry-run to look"):
        run(command, f"--dir={root}", *words)

    assert written(root) == before


def test_a_folder_that_is_none_is_named(root: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"--dir: .*nowhere is no folder"):
        run("setup", f"--dir={root / 'nowhere'}", "--yes")


def test_a_user_that_is_none_is_named() -> None:
    with pytest.raises(InvalidRequest, match="--user: there is no user nobody-at-all"):
        run("setup", "--user=nobody-at-all", "--yes")
