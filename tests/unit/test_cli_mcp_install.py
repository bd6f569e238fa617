"""`forkd mcp install`: it shows what it would write, merges, and keeps what is there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cli import Ended

ENTRY = {"command": "forkd", "args": ["mcp", "serve"]}


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, and a folder of a project in which the command runs."""
    (tmp_path / "project").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr("sys.argv", ["/opt/forkd/bin/forkd"])
    return tmp_path


def written(path: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(path.read_text())
    return said


def test_a_dry_run_shows_the_change_and_writes_nothing(
    forkd: Callable[..., Ended], folders: Path
) -> None:
    ended = forkd("mcp", "install", "claude", "--dry-run")

    assert ended.code == 0
    assert ended.out.startswith(f"{folders}/project/.mcp.json:\n")
    assert '+    "forkd": {' in ended.out
    assert [*folders.rglob("*.json")] == []


@pytest.mark.parametrize(
    ("client", "path", "key", "entry"),
    [
        ("claude", "project/.mcp.json", "mcpServers", ENTRY),
        ("vscode", "project/.vscode/mcp.json", "servers", {"type": "stdio", **ENTRY}),
        (
            "cursor",
            "home/.cursor/mcp.json",
            "mcpServers",
            {**ENTRY, "command": "/opt/forkd/bin/forkd"},
        ),
    ],
)
def test_each_client_gets_the_entry_that_it_understands(  # noqa: PLR0913, PLR0917 - what a row has
    forkd: Callable[..., Ended], folders: Path, client: str, path: str, key: str, entry: object
) -> None:
    assert forkd("mcp", "install", client, "--yes").code == 0

    assert written(folders / path) == {key: {"forkd": entry}}
    assert (folders / path).stat().st_mode & 0o777 == 0o600
    again = forkd("mcp", "install", client, "--yes")
    assert (again.code, again.out) == (0, "")
    assert "has it already" in again.err


def test_what_is_there_is_kept(forkd: Callable[..., Ended], folders: Path) -> None:
    path = folders / "project/.mcp.json"
    before = {
        "theme": "dark",
        "mcpServers": {
            "other": {"command": "x", "args": ["-v"]},
            "forkd": {"command": "old", "args": [], "env": {"FORKD_TOKEN": "kept"}},
        },
    }
    path.write_text(json.dumps(before))
    path.chmod(0o640)

    ended = forkd("--context", "build", "mcp", "install", "claude", "--yes")

    assert ended.code == 0
    args = ["--context", "build", "mcp", "serve"]
    assert written(path) == {
        "theme": "dark",
        "mcpServers": {
            "other": {"command": "x", "args": ["-v"]},
            "forkd": {"command": "forkd", "args": args, "env": {"FORKD_TOKEN": "kept"}},
        },
    }
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in path.parent.iterdir()] == [".mcp.json"]


def test_a_link_stays_a_link(forkd: Callable[..., Ended], folders: Path) -> None:
    real = folders / "dotfiles.json"
    real.write_text("{}")
    (folders / "project/.mcp.json").symlink_to(real)

    assert forkd("mcp", "install", "claude", "--yes").code == 0

    assert (folders / "project/.mcp.json").is_symlink()
    assert written(real) == {"mcpServers": {"forkd": ENTRY}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{ // a comment\n}", "is not JSON"),
        ("[]", "is not an object in JSON"),
        ('{"mcpServers": []}', "mcpServers is not what claude understands"),
        ('{"mcpServers": {"forkd": 1}}', "mcpServers is not what claude understands"),
    ],
)
def test_a_file_that_is_not_understood_is_left_alone(
    forkd: Callable[..., Ended], folders: Path, text: str, said: str
) -> None:
    path = folders / "project/.mcp.json"
    path.write_text(text)

    ended = forkd("mcp", "install", "claude", "--yes")

    assert ended.code == 2
    assert said in ended.err
    assert 'add {"forkd": {"command": "forkd"' in ended.err
    assert path.read_text() == text


def test_without_a_terminal_it_asks_for_yes(forkd: Callable[..., Ended], folders: Path) -> None:
    ended = forkd("mcp", "install", "claude")

    assert ended.code == 2
    assert "nothing was written: pass --yes" in ended.err
    assert [*folders.rglob("*.json")] == []


def test_a_client_that_nobody_knows_is_named_once(forkd: Callable[..., Ended]) -> None:
    ended = forkd("mcp", "install", "emacs")

    assert ended.code == 2
    assert "CLIENT: 'emacs' is not one of 'claude', 'claude-desktop', 'cursor'" in ended.err
