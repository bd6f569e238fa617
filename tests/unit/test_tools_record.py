"""A recording shows what a terminal showed, when it did."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from tests.support.docs import ROOT
from tools import record
from tools.record import Piece, drawn, spans

SVG = "{http://www.w3.org/2000/svg}"

PIECES = [
    Piece(0.0, "$ "),
    Piece(1.0, "e"),
    Piece(1.05, "cho"),
    Piece(1.5, " <&>\n"),
    Piece(1.9, "<&>\n$ "),
]


def test_text_is_placed_by_line_and_column_and_joined_if_it_came_together() -> None:
    assert [(line, column, piece.text) for line, column, piece in spans(PIECES)] == [
        (0, 0, "$ "),
        (0, 2, "echo"),
        (0, 6, " <&>"),
        (1, 0, "<&>"),
        (2, 0, "$ "),
    ]


def test_each_text_is_hidden_until_it_came() -> None:
    root = ET.fromstring(drawn(PIECES, ["echo <&>"]))  # noqa: S314 - made here

    texts = [
        (text.text, each.get("to"), each.get("begin"), each.get("dur"))
        for text in root.iter(f"{SVG}text")
        for each in text
    ]
    assert texts[0] == ("echo", "hidden", "loop.begin", "1.00s")
    assert texts[2] == ("<&>", "hidden", "loop.begin", "1.90s")
    loop = next(root.iter(f"{SVG}animate"))
    assert (loop.get("begin"), loop.get("dur")) == ("0s;loop.end", "5.90s")
    assert "echo <&>" in (root.findtext(f"{SVG}desc") or "")


def test_the_picture_of_the_readme_has_the_commands_of_today() -> None:
    """Record it anew, as the docstring of `tools/record.py` says, if this fails."""
    picture = ROOT / "docs/assets/terminal.svg"
    root = ET.fromstring(picture.read_text(encoding="utf-8"))  # noqa: S314 - our own file
    lines: dict[str, str] = {}
    for each in root.iter(f"{SVG}text"):
        line = each.get("y", "")
        lines[line] = lines.get(line, "") + (each.text or "")

    typed = [each.removeprefix(record.PROMPT) for each in lines.values() if each.startswith("$ ")]
    assert typed[: len(record.COMMANDS)] == list(record.COMMANDS)
    assert not [each for each in lines.values() if re.match("error:|Traceback", each)]
