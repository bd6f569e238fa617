"""Where programs of agents keep the list of their MCP servers, and one more in it."""

from __future__ import annotations

import difflib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.errors import HostError, InvalidRequest

CONFIG_BYTES_MAX = 16 * 1024 * 1024
"""A configuration longer than this is none."""

MODE_DEFAULT = 0o600
"""Mode of a configuration that is made new: others put tokens into it."""


@dataclass(frozen=True, slots=True)
class Client:
    """A program of agents.

    Attributes:
        path: Its configuration, below the user's folder or the current one.
        of_user: Whether that is below the user's folder.
        key: Which member of the configuration has the servers.
        more: What an entry has besides.
    """

    path: str
    of_user: bool
    key: str = "mcpServers"
    more: tuple[tuple[str, str], ...] = ()


DESKTOP = (
    "Library/Application Support/Claude/claude_desktop_config.json"
    if sys.platform == "darwin"
    else ".config/Claude/claude_desktop_config.json"
)

CLIENTS = {
    "claude": Client(".mcp.json", of_user=False),
    "claude-desktop": Client(DESKTOP, of_user=True),
    "cursor": Client(".cursor/mcp.json", of_user=True),
    "vscode": Client(".vscode/mcp.json", of_user=False, key="servers", more=(("type", "stdio"),)),
}
"""Programs by their names."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be written.

    Attributes:
        path: The file.
        before: Its text; empty if there is none.
        after: The text that it gets.
    """

    path: Path
    before: str
    after: str

    @property
    def is_there(self) -> bool:
        """Whether there is nothing to change."""
        return self.before == self.after

    @property
    def difference(self) -> str:
        """What changes, as `diff -u` shows it."""
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), "before", "after", lineterm=""
        )
        return "\n".join(lines)

    def write(self) -> None:
        """Write the file, whole or not at all; a link stays one, and the mode stays.

        Raises:
            HostError: It cannot be written.
        """
        path = self.path.resolve()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = path.stat().st_mode & 0o7777 if path.exists() else MODE_DEFAULT
            number, aside = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
            try:
                with os.fdopen(number, "w", encoding="utf-8") as file:
                    file.write(self.after)
                Path(aside).chmod(mode)
                Path(aside).replace(path)
            except BaseException:
                Path(aside).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise HostError(f"{path} cannot be written: {error.strerror}") from error


def planned(client: str, name: str, front: list[str]) -> Change:
    """Return what adds the server to the configuration of a client.

    Args:
        client: Which.
        name: What it calls the server.
        front: Options of `forkd` in front of its command.

    Raises:
        InvalidRequest: The file that is there cannot be understood.
        HostError: It cannot be read.
    """
    found = CLIENTS[client]
    path = (Path.home() if found.of_user else Path.cwd()) / found.path
    before = _text(path)
    command, *rest = _program(of_user=found.of_user)
    entry = {**dict(found.more), "command": command, "args": [*rest, *front, "mcp", "serve"]}
    by_hand = f"add {json.dumps({name: entry})} to its {found.key} by hand"
    said = _parsed(path, before, by_hand)
    servers = said.setdefault(found.key, {})
    if not isinstance(servers, dict) or not isinstance(servers.get(name, {}), dict):
        raise InvalidRequest(f"{path}: {found.key} is not what {client} understands; {by_hand}")
    was = servers.get(name, {})
    if {**was, **entry} == was:
        return Change(path, before, before)
    servers[name] = {**was, **entry}
    return Change(path, before, json.dumps(said, indent=2, ensure_ascii=False) + "\n")


def _parsed(path: Path, text: str, by_hand: str) -> dict[str, Any]:
    try:
        said = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON ({error}); {by_hand}") from None
    if not isinstance(said, dict):
        raise InvalidRequest(f"{path} is not an object in JSON; {by_hand}")
    return said


def _text(path: Path) -> str:
    try:
        if not path.exists():
            return ""
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise InvalidRequest(f"{path} is longer than {CONFIG_BYTES_MAX} bytes")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not text in UTF-8") from None
    except OSError as error:
        raise HostError(f"{path} cannot be read: {error.strerror}") from error


def _program(*, of_user: bool) -> list[str]:
    """Return how this command is started: with its path where only this user reads it."""
    ours = Path(sys.argv[0])
    if ours.name != "forkd":
        return [sys.executable, "-m", "forkd"]
    return [str(ours.resolve())] if of_user else ["forkd"]
