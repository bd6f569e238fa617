"""`forkd doctor` asks the daemon that other commands would talk to, says which, and looks here."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from forkd.cli.context import shared

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

HERE = '[{"name": "KVM", "status": "PASS", "found": "a test guest runs", "advice": ""}]'


@pytest.fixture(autouse=True)
def _no_examination(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What examines this host takes seconds, and has tests of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("FORKD_HOME", str(tmp_path))
    monkeypatch.setattr(shared, "context", None)
    says(monkeypatch, HERE)


def says(monkeypatch: pytest.MonkeyPatch, out: str, complaint: str = "") -> None:
    """Have the examination of this host say something."""
    done = subprocess.CompletedProcess([sys.executable], 0, out, complaint)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)


def test_the_daemon_is_named_with_what_says_that_it_is_asked(
    forkd: Callable[..., Ended], daemon: RunningDaemon
) -> None:
    ended = forkd("doctor")

    lines = ended.out.splitlines()
    assert lines[0].startswith("PASS  daemon: forkd ")
    assert f"answers at {daemon.url} (FORKD_URL), with 0 sandboxes" in lines[0]
    assert "PASS  KVM: a test guest runs" in lines
    assert f"({'--url'})" in forkd("--url", daemon.url, "doctor").out


def test_a_context_is_named(
    forkd: Callable[..., Ended], daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    forkd("context", "add", "lab", daemon.url, "--use")
    assert "(--context lab)" in forkd("--context", "lab", "doctor").out
    monkeypatch.delenv("FORKD_URL")
    assert "(context lab)" in forkd("doctor").out


def test_a_daemon_that_was_named_and_does_not_answer_fails(
    forkd: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKD_URL", "http://127.0.0.1:1")

    ended = forkd("doctor", "--json")

    first = ended.document[0]
    assert (ended.code, first["status"]) == (1, "FAIL")
    assert first["found"].startswith("FORKD_URL: no daemon answers at http://127.0.0.1:1")


def test_a_context_that_is_none_fails(forkd: Callable[..., Ended]) -> None:
    ended = forkd("--context", "nope", "doctor")

    assert ended.code == 1
    assert "FAIL  daemon: --context nope: there is no context 'nope'" in ended.out


def test_without_the_daemons_extra_the_daemon_is_asked_all_the_same(
    forkd: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, "", "error: the Python package fastapi is not installed\n")

    ended = forkd("doctor")

    assert ended.code == 0
    assert "PASS  daemon: " in ended.out
    assert (
        "SKIP  this host: not examined: error: the Python package fastapi is not installed"
        in ended.out
    )
