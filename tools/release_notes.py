"""Make release notes of the fragments in `changes/`.

A fragment is one sentence for users, in a file `<name>.<kind>.md`.  Notes have a section for each
kind, with its fragments by name, so that the same fragments always make the same notes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import date
    from pathlib import Path

KINDS = {"added": "Added", "changed": "Changed", "fixed": "Fixed", "removed": "Removed"}
"""Kinds of fragments, in the order of their sections, and the headings of these."""

FRAGMENT = re.compile(rf"(?P<name>[a-z0-9-]+)\.(?P<kind>{'|'.join(KINDS)})\.md")


class BadFragment(Exception):
    """A file in `changes/` is no fragment."""


def notes(fragments: Path, version: str, day: date) -> str:
    """Return the release notes of a version as Markdown.

    Raises:
        BadFragment: A file in the folder is no fragment; names it.
    """
    sections: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in sorted(fragments.iterdir()):
        if path.name != "README.md":
            sections[_kind(path)].append(_sentence(path))
    lines = [f"# forkd {version} ({day.isoformat()})"]
    for kind, sentences in sections.items():
        if sentences:
            lines += ["", f"## {KINDS[kind]}", "", *(f"- {each}" for each in sentences)]
    return "\n".join(lines) + "\n"


def _kind(path: Path) -> str:
    match = FRAGMENT.fullmatch(path.name)
    if match is None:
        raise BadFragment(f"{path.name} in changes is not <name>.<{'|'.join(KINDS)}>.md")
    return match["kind"]


def _sentence(path: Path) -> str:
    """Return a fragment on one line, with links that work from the root of the checkout."""
    sentence = " ".join(path.read_text(encoding="utf-8").split())
    if not sentence:
        raise BadFragment(f"{path.name} in changes is empty")
    return sentence.replace("](../", "](")
