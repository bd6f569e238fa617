r"""What a notebook or a terminal shows of a result: plain text and HTML, safe to display.

Output of a guest is hostile until shown otherwise.  In HTML everything is escaped.  In both forms
control characters (which move cursors and change terminals) and characters that reorder text are
written as escapes, such as `\x1b`.
"""

from __future__ import annotations

import base64
import html
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TEXT_CHARS_MAX = 100_000
"""Characters of one text that a notebook cell shows; the end is kept, where errors are."""

PAGE_PIXELS_MAX = 400
"""Height of the frame around HTML of a guest; the frame scrolls."""

PAGE_ROW_PIXELS = 28
"""Height of a row of a table, about."""

ROWS_MAX = 1_000
"""Rows of one table that a notebook cell shows."""

REPR_CHARS_MAX = 200
"""Characters of one value in the `repr` of a result."""

_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)

_FAINT = "color:#777"
_RED = "color:#b00020"


class Shown:
    """What has a plain text and an HTML form for notebooks."""

    __slots__ = ()

    def _shown_text(self) -> str:
        """Return what a terminal shows."""
        return visible(str(self))

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return block(str(self))

    def _repr_mimebundle_(
        self,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
    ) -> dict[str, str]:
        """Return both forms, as IPython asks for them."""
        forms = {"text/plain": self._shown_text(), "text/html": self._repr_html_()}
        wanted = forms.keys() if include is None else set(include)
        return {
            kind: form
            for kind, form in forms.items()
            if kind in wanted and kind not in set(exclude or ())
        }


def visible(text: str) -> str:
    """Return text in which what cannot be seen is an escape; lines and tabs stay."""
    return _INVISIBLE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"  # noqa: PLR2004 - one byte


def shortened(value: object) -> str:
    """Return the `repr` of a value, cut to what fits one line."""
    text = repr(value)
    return text if len(text) <= REPR_CHARS_MAX else f"{text[: REPR_CHARS_MAX - 1]}…"


def block(text: str, style: str = "") -> str:
    """Return text as a preformatted block; nothing for no text."""
    if not text:
        return ""
    cut = len(text) - TEXT_CHARS_MAX
    if cut > 0:
        text = f"… {cut} characters before this\n{text[-TEXT_CHARS_MAX:]}"
    looks = f' style="{style}"' if style else ""
    return f"<pre{looks}>{_safe(text)}</pre>"


def faint(text: str) -> str:
    """Return a remark as a block in grey."""
    return block(text, _FAINT)


def red(text: str) -> str:
    """Return an error as a block in red."""
    return block(text, _RED)


def picture(*, png: str | None, jpeg: str | None, svg: str | None) -> str:
    """Return a picture; as the source of `<img>`, an SVG runs no scripts and loads nothing."""
    if png is not None:
        kind, data = "png", png
    elif jpeg is not None:
        kind, data = "jpeg", jpeg
    else:
        kind, data = "svg+xml", base64.b64encode((svg or "").encode()).decode()
    return f'<img src="data:image/{kind};base64,{html.escape(data)}"/>'


def page(text: str) -> str:
    """Return HTML of a guest in a frame of its own, which runs no scripts and has no origin."""
    height = min(PAGE_PIXELS_MAX, PAGE_ROW_PIXELS * (2 + text.count("<tr") + text.count("<p")))
    looks = f"width:100%;height:{height}px;border:0"
    return f'<iframe sandbox="" style="{looks}" srcdoc="{html.escape(text)}"></iframe>'


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table; rows beyond `ROWS_MAX` are counted in its last line."""
    head = "".join(f"<th>{_safe(each)}</th>" for each in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{_safe(_cell(each))}</td>' for each in row)}</tr>"
        for row in rows[:ROWS_MAX]
    )
    more = len(rows) - ROWS_MAX
    last = f'<tr><td colspan="{len(columns)}">… {more} more</td></tr>' if more > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}{last}</tbody></table>"


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def _safe(text: str) -> str:
    return html.escape(visible(text))
