"""What documentation points at is there: pages, headings, files, tests."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.support.docs import ROOT, anchors, links, page_id, pages, prose

if TYPE_CHECKING:
    from pathlib import Path

FOLDERS = ("benchmarks", "crates", "docs", "fuzz", "protocol", "recipes", "src", "tests", "tools")
NAMED_PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*\w)`")
NAMED_TEST = re.compile(r"`([\w./-]+\.(?:py|rs))::(\w+)`")

WORDS = re.compile(r"\b(?:bak(?:e|es|ed|ing)|seeds?|chains?|zygotes?)\b")
GUIDES = [ROOT / "docs" / folder for folder in ("howto", "tutorial", "explanation")]
FEW = 3
"""A page that says our words more often than this explains them: it links to the glossary."""

PROMISES = [ROOT / name for name in ("SPECIFICATION.md", "SECURITY.md")]


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = [target for target in links(page) if not leads_somewhere(page, target)]

    assert broken == []


def leads_somewhere(page: Path, target: str) -> bool:
    if "://" in target:
        return True
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    return path.exists() and (not anchor or anchor in anchors(path))


@pytest.mark.parametrize("page", [p for p in pages() if p.parent in GUIDES], ids=page_id)
def test_a_page_with_words_of_ours_leads_to_the_glossary(page: Path) -> None:
    found = WORDS.findall(prose(page))
    there = any(target.endswith("glossary.md") for target in links(page))

    assert there or len(found) <= FEW, found


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = NAMED_PATH.findall(prose(page))

    assert [path for path in named if not exists(page, path)] == []


def exists(page: Path, path: str) -> bool:
    """Whether a path is there from the root, or from the page's own folder."""
    return "NNNN" in path or (ROOT / path).exists() or (page.parent / path).exists()


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_every_test_that_is_named_exists(page: Path) -> None:
    named = NAMED_TEST.findall(page.read_text(encoding="utf-8"))

    assert [f"{path}::{name}" for path, name in named if name not in found_in(path)] == []


@cache
def found_in(path: str) -> frozenset[str]:
    """Return the names of the tests in a file, Python's or Rust's."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return frozenset(re.findall(r"^\s*(?:async )?def (test_\w+)\(", text, re.MULTILINE))
    marked = re.findall(r"#\[test\]\s*(?:#\[[^\]]*\]\s*)*fn (\w+)\(", text)
    return frozenset(marked)


def test_every_promise_names_a_test() -> None:
    text = (ROOT / "SPECIFICATION.md").read_text(encoding="utf-8")
    promises = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]

    assert [each.partition("\n")[0] for each in promises if not NAMED_TEST.search(each)] == []


def test_promises_are_numbered_without_a_gap() -> None:
    text = (ROOT / "SPECIFICATION.md").read_text(encoding="utf-8")
    numbers = [int(each) for each in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]

    assert numbers == list(range(1, len(numbers) + 1))


def test_the_map_has_every_package_and_every_crate() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    crates = [path.parent.name for path in (ROOT / "crates").glob("*/Cargo.toml")]
    packages = [path.parent.name for path in (ROOT / "src/forkd").glob("*/__init__.py")]

    assert [name for name in (*crates, *packages) if f"| `{name}` |" not in text] == []


def test_every_decision_can_be_found_by_its_number() -> None:
    names = [path.name for path in (ROOT / "docs/adr").glob("*.md")]
    numbers = [name[:4] for name in names]

    assert len(set(numbers)) == len(numbers)
    assert all(re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", name) for name in names)
