"""Pictures of the documentation are whole, small, described, and shown by a page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from tests.support import captives
from tests.support.docs import ROOT, links, pages, tries_in
from tools import gen_plots

if TYPE_CHECKING:
    from pathlib import Path

ASSETS = ROOT / "docs/assets"
BYTES_MAX = 40 * 1024
SVG = "{http://www.w3.org/2000/svg}"

PICTURES = sorted(ASSETS.glob("*.svg"))


@pytest.fixture(scope="module")
def shown() -> set[Path]:
    """Return every file to which a link of a page leads."""
    return {(page.parent / each).resolve() for page in pages() for each in links(page)}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_small_and_says_what_it_shows(path: Path) -> None:
    root = ET.fromstring(path.read_text(encoding="utf-8"))  # noqa: S314 - our own file

    assert root.tag == f"{SVG}svg"
    assert root.get("viewBox")
    assert all((root.findtext(f"{SVG}{each}") or "").strip() for each in ("title", "desc"))
    assert path.stat().st_size <= BYTES_MAX


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_needs_nothing_but_itself(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")

    assert re.findall(r"<image|<script|href=|https?:|@import", text) == []
    assert 'class="panel"' in text, "a background of its own, so that it can be read on any page"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_shown_by_a_page(path: Path, shown: set[Path]) -> None:
    assert path.resolve() in shown


def test_there_is_a_drawing_of_each_idea() -> None:
    names = {path.stem for path in PICTURES}

    assert names >= {"fork", "branch", "chain", "isolation"}


def test_every_plot_says_where_its_figures_are_from() -> None:
    for path, text in gen_plots.outputs().items():
        assert path.read_text(encoding="utf-8") == text, "run `python -m tools.gen`"
        assert re.search(r"<desc>(ADR \d{4}|make bench at commits? \w{7})", text)


def test_a_range_is_drawn_from_its_least_to_its_most() -> None:
    figure = {"title": "t", "unit": "u", "source": "s", "rows": [["a", 1.0, 2.0], ["b", 2.0]]}

    text = gen_plots.plot(figure)

    assert 'class="bar" x="404" y="68" width="150"' in text
    assert 'class="range" x="554" y="68" width="150.0"' in text
    assert "1 to 2" in text


def test_the_overview_counts_the_tries_that_are_made() -> None:
    page = (ROOT / "docs/explanation/security-overview.md").read_text(encoding="utf-8")
    hostile = tries_in("What a hostile package was refused")

    assert f"makes {len(captives.tries())} tries" in page
    assert f"makes {len(hostile)} tries" in page
    assert not captives.got("machine"), "the page says that a captured sandbox succeeds in none"


def test_what_the_bars_are_compared_with_is_a_line_across_them() -> None:
    figure = {"title": "t", "unit": "u", "source": "s", "line": 1, "rows": [["a", 1.0, 2.0]]}

    assert '<line class="line" x1="554" y1="62" x2="554"' in gen_plots.plot(figure)
    assert "<line" not in gen_plots.plot({**figure, "line": None})
