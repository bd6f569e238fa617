"""What a command line names: sandboxes by the beginning of their ids, snapshots by their tags."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

from forkd.errors import NotFound
from forkd.limits import SANDBOX_ID_PATTERN

if TYPE_CHECKING:
    from forkd import Client

ID_START = "sb-"

_WHOLE_ID = re.compile(SANDBOX_ID_PATTERN.removesuffix("$"))

PORTS = {"http": 80, "https": 443}
"""Ports of URLs that do not say theirs."""


def network_rule(text: str) -> str:
    """Return a rule of a network policy, unless it is a URL."""
    if "://" not in text:
        return text
    try:
        parts = urlsplit(text)
        name, port = parts.hostname, parts.port or PORTS.get(parts.scheme)
    except ValueError:
        name, port = None, None
    example = f"{name}:{port}" if name and port else "example.com:443"
    raise typer.BadParameter(f"give a name, not a URL: {example}")


def sandbox_id(client: Client, text: str) -> str:
    """Return the id that `text` is, of a sandbox that may be gone, or begins.

    Raises:
        NotFound: No sandbox has an id that begins so.
        InvalidRequest: Several have.
    """
    return text if _WHOLE_ID.fullmatch(text) else client.sandboxes.get(text).id


def machine(client: Client, text: str) -> str:
    """Return the id of a sandbox that `text` is or begins, or the name of a snapshot.

    A snapshot of that very name comes before a sandbox whose id begins so; `sb-` is not left out.

    Raises:
        NotFound: There is neither.
        InvalidRequest: Several sandboxes have ids that begin so.
    """
    if _WHOLE_ID.fullmatch(text) or not text.startswith(ID_START):
        return text
    try:
        return client.snapshots.info(text).tag
    except NotFound:
        return client.sandboxes.get(text).id
