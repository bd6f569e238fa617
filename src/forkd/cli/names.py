"""What a command line names: sandboxes by the beginning of their ids, snapshots by their tags."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

from forkd.errors import InvalidRequest, NotFound
from forkd.limits import SANDBOX_ID_PATTERN

if TYPE_CHECKING:
    from forkd import Client

ID_START = "sb-"

_WHOLE_ID = re.compile(SANDBOX_ID_PATTERN.removesuffix("$"))

REPEATED_CHARS_MAX = 80
"""How much of what was typed an error repeats."""

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


def pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    """Return what was given as KEY=VALUE.

    Raises:
        InvalidRequest: One has no key, or no value.
    """
    found = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidRequest(
                f"{option}: {cut(text)} is not of the form KEY=VALUE", field="label"
            )
        found[key] = value
    return found


def label_changes(texts: list[str]) -> dict[str, str | None]:
    """Return labels that are set as KEY=VALUE, and with None those that are removed as KEY-.

    Raises:
        InvalidRequest: One is neither, or a key is there twice.
    """
    found: dict[str, str | None] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            key = key.removesuffix("-")
        if not key or (not equals and not text.endswith("-")):
            raise InvalidRequest(f"{cut(text)} is neither KEY=VALUE nor KEY-", field="label")
        if key in found:
            raise InvalidRequest(f"the label {cut(key)} is there twice", field="label")
        found[key] = value if equals else None
    return found


def filters(texts: list[str] | None) -> dict[str, str | None]:
    """Return labels that are asked for as KEY, or as KEY=VALUE."""
    parts = [text.partition("=") for text in texts or ()]
    return {key: value if equals else None for key, equals, value in parts}


def cut(text: str) -> str:
    """Return a text as an error repeats it."""
    more = len(text) - REPEATED_CHARS_MAX
    return repr(text) if more <= 0 else f"{text[:REPEATED_CHARS_MAX]!r} and {more} characters more"


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
