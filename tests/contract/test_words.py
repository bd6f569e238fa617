"""One word per thing: words that were retired do not come back.

ARCHITECTURE.md has the glossary.  Decisions (docs/adr) and the changelog are history and keep
their words.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROSE_COLUMNS_MAX = 120
"""Longest line of a paragraph: one that a person can review in a diff."""

RETIRED = {
    r"stands? still|stood still": "paused",
    r"(stands?|stood) on": "depends on",
    r"shares? with nobody|shared with nobody": "private memory",
    r"nobody else": "exclusive, or who it is",
    r"what nobody": "unused, or who",
    r"somebody anew|\bbecome somebody": "a new identity",
    r"memory(/|::)held": "the seed's memory, `memory/seed_memory.rs`",
    r"\bend_with\b": "die_with_daemon, die_with_parent",
    r"\bheld (to|against|beside|whole|for)\b": "compared with, or buffered",
}
"""What is not said any more, as a regular expression, and what is said instead."""

HISTORY = ("docs/adr/", "changes/", "CHANGELOG.md", "tests/contract/test_words.py")
KINDS = {".py", ".md", ".rs", ".toml", ".json", ".c", ".sh"}


def texts() -> list[Path]:
    """Return the files that people read."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # noqa: S607 - ours
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    kept = (name for name in listed if not name.startswith(HISTORY))
    return [ROOT / name for name in kept if Path(name).suffix in KINDS]


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_does_not_come_back(word: str) -> None:
    pattern = re.compile(word, re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in texts()
        if path.is_file()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == [], f"say {RETIRED[word]!r}"


@pytest.mark.parametrize("word", RETIRED)
def test_each_pattern_finds_its_word(word: str) -> None:
    examples = "It stands still. It stood on it. Shared with nobody, nobody else; what nobody "
    examples += "knows. Become somebody. memory/held.rs, end_with. Held to it."
    assert re.search(word, examples, re.IGNORECASE)


def paragraphs(text: str) -> list[tuple[int, str]]:
    """Return the lines of a Markdown text that could be wrapped, with their numbers."""
    found, in_code = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith(("|", "#", "    ", "<")):
            found.append((number, re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)", "x", line)))
    return found


def test_prose_is_wrapped() -> None:
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in texts()
        if path.suffix == ".md" and path.is_file()
        for number, line in paragraphs(path.read_text(encoding="utf-8"))
        if len(line) > PROSE_COLUMNS_MAX
    ]
    assert wide == [], f"wrap at {PROSE_COLUMNS_MAX} columns"
