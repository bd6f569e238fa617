"""Draw the plots of the documentation from the figures that were measured.

    python -m tools.gen         writes them, with everything else that is generated

`docs/assets/plots.json` has the figures, each with its source.  A plot is a bar for each figure, or
a range if runs differed, and needs no library, so that the same figures give the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs/assets"
FIGURES = ASSETS / "plots.json"

WIDTH = 800
LABEL_WIDTH = 380
BAR_X = LABEL_WIDTH + 24
BAR_WIDTH = 300
ROW_HEIGHT = 30
HEAD_HEIGHT = 62

STYLE = """\
  <style>
    .panel { fill: #ffffff; stroke: #c9d1d9; }
    .bar { fill: #b6d4f5; stroke: #2f6db3; }
    .range { fill: #ffc98b; stroke: #b25e00; }
    text { font: 14px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f; }
    .title { font-size: 16px; font-weight: 600; }
    .small { font-size: 12px; fill: #57606a; }
    .line { stroke: #24292f; stroke-dasharray: 4 3; }
    .end { text-anchor: end; }
  </style>
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure of a plot.

    Attributes:
        label: What was measured.
        low: The figure, or the least of several runs.
        high: The same, or the most of several runs.
    """

    label: str
    low: float
    high: float


def outputs() -> dict[Path, str]:
    """Return every plot with its contents."""
    figures: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return {ASSETS / f"plot-{name}.svg": plot(each) for name, each in figures.items()}


def plot(figure: dict[str, Any]) -> str:
    """Return a plot as SVG."""
    bars = [Bar(row[0], row[1], row[-1]) for row in figure["rows"]]
    most = max(bar.high for bar in bars)
    height = HEAD_HEIGHT + ROW_HEIGHT * len(bars) + 14
    title, unit = escape(figure["title"]), escape(figure["unit"])
    drawn = [_drawn(bar, HEAD_HEIGHT + ROW_HEIGHT * row, most) for row, bar in enumerate(bars)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"  <title>{title}</title>",
            f"  <desc>{escape(figure['source'])}</desc>",
            STYLE.rstrip("\n"),
            f'  <rect class="panel" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}"/>',
            f'  <text class="title" x="24" y="30">{title}</text>',
            f'  <text class="small" x="24" y="49">{unit}</text>',
            *drawn,
            *_line(figure.get("line"), most, height),
            "</svg>\n",
        ]
    )


def _line(value: float | None, most: float, height: int) -> list[str]:
    """Return a dashed line at the figure that the bars are compared with, if there is one."""
    if value is None:
        return []
    x = BAR_X + round(BAR_WIDTH * value / most, 1)
    bottom = height - 8
    return [f'  <line class="line" x1="{x:g}" y1="{HEAD_HEIGHT}" x2="{x:g}" y2="{bottom}"/>']


def _drawn(bar: Bar, y: int, most: float) -> str:
    """Return a bar with its label and its figure."""
    low, high = (round(BAR_WIDTH * value / most, 1) for value in (bar.low, bar.high))
    shown = f"{bar.low:,g}" if bar.low == bar.high else f"{bar.low:,g} to {bar.high:,g}"
    spread = (
        f'<rect class="range" x="{BAR_X + low:g}" y="{y + 6}" '
        f'width="{high - low:.1f}" height="16"/>'
        if high > low
        else ""
    )
    return (
        f'  <text class="end" x="{LABEL_WIDTH + 14}" y="{y + 19}">{escape(bar.label)}</text>\n'
        f'  <rect class="bar" x="{BAR_X}" y="{y + 6}" width="{low:g}" height="16"/>{spread}\n'
        f'  <text x="{BAR_X + high + 6:g}" y="{y + 19}">{shown}</text>'
    )
