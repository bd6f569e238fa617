"""Shells complete commands, sandboxes, snapshots, recipes and contexts, and hear of no error."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from forkd.cli import complete
from forkd.cli.main import app
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]
    Completed = Callable[..., list[str]]


@pytest.fixture
def completed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Completed:
    """A function that returns what bash is offered for the last of some words."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def run(*words: str) -> list[str]:
        with monkeypatch.context() as shell:
            shell.setenv("_FORKD_COMPLETE", "complete_bash")
            shell.setenv("COMP_WORDS", " ".join(["forkd", *words]))
            shell.setenv("COMP_CWORD", str(len(words)))
            with pytest.raises(SystemExit) as ended:
                app([], prog_name="forkd")
        said = capfd.readouterr()
        assert (ended.value.code or 0, said.err) == (0, "")
        return said.out.split()

    return run


@pytest.fixture
def ids(daemon: RunningDaemon, forkd: Forkd, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    daemon.service.stored = some_snapshots("warm", "cold")
    found = forkd("fork", "warm", "-n", "3").out.split()
    assert forkd("rename", found[0], "db").code == 0
    monkeypatch.setenv("FORKD_URL", "http://127.0.0.1:1")  # each test names its daemon
    return found


def test_names_of_commands_are_completed(completed: Completed) -> None:
    assert completed("sn") == ["snapshot"]
    assert completed("snapshot", "c") == ["create", "compact"]
    assert "ps" not in completed("")


def test_sandboxes_and_snapshots_are_completed_from_the_daemon_that_is_named(
    completed: Completed, ids: list[str], daemon: RunningDaemon
) -> None:
    url = ("--url", daemon.url)

    assert completed(*url, "exec", "sb-") == ids
    assert completed(*url, "kill", ids[0], ids[1][:8]) == [ids[1]]
    assert completed(*url, "shell", "d") == ["db"]
    assert completed(*url, "fork", "w") == ["warm"]
    assert completed(*url, "ls", "--tag", "") == ["cold", "warm"]
    assert set(completed(*url, "diff", "")) == {*ids, "db", "cold", "warm"}


def test_recipes_formats_and_contexts_are_completed(
    completed: Completed, daemon: RunningDaemon
) -> None:
    assert "good" in completed("--url", daemon.url, "build", "g")
    assert completed("ls", "-o", "js") == ["json", "jsonl"]
    assert completed("--context", "l") == ["local"]
    assert completed("context", "use", "") == ["local"]


@pytest.mark.usefixtures("ids")
def test_without_a_daemon_nothing_is_offered_and_nothing_said(completed: Completed) -> None:
    assert completed("exec", "sb-") == []
    assert completed("--url", "nonsense", "fork", "") == []
    assert completed("--context", "gone", "fork", "") == []


def test_a_daemon_that_does_not_answer_has_a_deadline(
    completed: Completed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complete, "DEADLINE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()

        assert completed("--url", f"http://{host}:{port}", "exec", "") == []
