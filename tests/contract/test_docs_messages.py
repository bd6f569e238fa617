"""Each message that the troubleshooting page quotes is one that the code can say."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.support.docs import ROOT

PAGE = ROOT / "docs/howto/troubleshoot.md"
PIECE_CHARS_MIN = 4
"""Shorter pieces of a message, between what differs, are in every file."""

SEAM = re.compile(r'"\s*\n\s*f?"')
"""Where one string of a source goes on in the next line."""

UNQUOTED = "Slow"
"""The section whose first column describes what a user sees, in words of its own."""


def messages() -> list[str]:
    """Return the messages of the page: code in the first cell of a row."""
    text, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n## {UNQUOTED}\n")
    assert rest
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


@cache
def sources() -> tuple[str, ...]:
    """Return what the code can say, file by file, with each string in one piece."""
    paths = [*(ROOT / "src/forkd").rglob("*.py"), *(ROOT / "crates").glob("*/src/**/*.rs")]
    texts = (path.read_text(encoding="utf-8") for path in paths)
    return tuple(SEAM.sub("", text).replace("`", "") for text in texts)


def is_said(message: str) -> bool:
    """Whether one file has all pieces of a message, in their order."""
    pieces = [each.strip() for each in message.split("…")]
    found = [re.escape(each) for each in pieces if len(each) >= PIECE_CHARS_MIN]
    pattern = re.compile(r"[^\n]*".join(found))
    return bool(found) and any(pattern.search(text) for text in sources())


@pytest.mark.parametrize("message", messages())
def test_a_message_that_is_explained_can_be_said(message: str) -> None:
    assert is_said(message)


def test_there_are_messages_to_explain() -> None:
    assert len(messages()) > 20


@pytest.mark.parametrize(
    "message",
    ["the moon has … MiB of memory left", "memory left … MiB of, and keeps", "… of …"],
)
def test_what_nothing_says_is_found_out(message: str) -> None:
    assert not is_said(message)
