"""Questions whose answers are not shown."""

from __future__ import annotations

import getpass

from forkd.errors import InvalidRequest


def hidden_once(what: str) -> str:
    """Ask for a value on the terminal, which does not show it."""
    return getpass.getpass(f"{what}: ").strip()


def hidden(what: str, *, field: str) -> str:
    """Ask twice for a value on the terminal, which does not show it.

    Raises:
        InvalidRequest: The two answers differ.
    """
    first = getpass.getpass(f"{what}: ")
    if getpass.getpass(f"{what} again: ") != first:
        raise InvalidRequest("the two values differ; nothing was changed", field=field)
    return first
