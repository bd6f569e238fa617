"""Ask how this host is set up, and set it up, for commands of the client side.

What looks at hosts and changes them is a program of its own, `forkd-daemon host`, because the
client side may not load it.  This is how others call it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from forkd.errors import HostError

TIMEOUT_S = 300.0
"""Time for all changes; each takes well below a second."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something that set-up would change.

    Attributes:
        part: What is changed: a path, a setting, a group and so on.
        title: The change, in a few words.
        why: What it is good for.
    """

    part: str
    title: str
    why: str


@dataclass(frozen=True, slots=True)
class SetUp:
    """What became of a set-up, or of undoing it.

    Attributes:
        done: What was changed.
        refused: What could not be changed, and why.
        left: What was left because somebody else has changed it since, and why.
    """

    done: tuple[str, ...]
    refused: dict[str, str]
    left: dict[str, str]


def command(name: str, *words: str) -> list[str]:
    """Return the words that run a command of `forkd-daemon host`."""
    return [sys.executable, "-m", "forkd.daemon", "host", name, *words]


def changes() -> tuple[Change, ...]:
    """Return what set-up would change on this host; needs no root, and changes nothing.

    Raises:
        HostError: It cannot be found out; the message says why.
    """
    said = _ask(command("setup", "--dry-run", "--json"), {0})
    return tuple(Change(each["part"], each["title"], each["why"]) for each in said["changes"])


def setup() -> SetUp:
    """Set this host up without asking: whoever calls this has shown `changes` and asked.

    Without root this runs by sudo, which may ask for a password on the terminal.

    Raises:
        HostError: It did not run; the message says why, and nothing was changed.
    """
    return _done(_ask([*_as_root(), *command("setup", "--yes", "--json")], {0, 1}))


def undo() -> SetUp:
    """Take back what set-up has changed, without asking; else as `setup`."""
    return _done(_ask([*_as_root(), *command("undo", "--yes", "--json")], {0, 1}))


def _as_root() -> list[str]:
    return [] if os.geteuid() == 0 else ["sudo", "--"]


def _done(said: dict[str, Any]) -> SetUp:
    return SetUp(tuple(said["done"]), said["refused"], said["left"])


def _ask(words: list[str], fine: set[int]) -> dict[str, Any]:
    """Run a command; return the document that it prints."""
    try:
        done = subprocess.run(words, capture_output=True, timeout=TIMEOUT_S, check=False)  # noqa: S603 - our own program
        if done.returncode in fine and done.stdout:
            said: dict[str, Any] = json.loads(done.stdout)
            return said
        tail = done.stderr.decode(errors="replace").strip()
        raise HostError(f"`forkd host` failed: {_reason(tail)}")
    except subprocess.TimeoutExpired as error:
        raise HostError(f"`forkd host` took longer than {TIMEOUT_S:.0f} s") from error
    except (OSError, ValueError) as error:
        raise HostError(f"`forkd host` cannot be asked: {error}") from error


def _reason(said: str) -> str:
    """Return the message of an error, which is JSON if the command came so far."""
    last = said.splitlines()[-1] if said else "it says nothing"
    try:
        return str(json.loads(last)["error"])
    except (ValueError, LookupError, TypeError):
        return last
