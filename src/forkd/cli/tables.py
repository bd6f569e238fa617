"""Lists and details as people or programs read them.

A table fits its terminal, and no cell is ever cut.  Where a terminal is too narrow:

1. a cell of more than `FOLDED_CHARS` characters continues on further lines;
2. columns that are `minor` are left out, from the right;
3. the other columns become narrower, down to `FOLDED_CHARS_MIN`, the widest first;
4. of these, too, columns are left out from the right, except for the first.

A pipe gets all default columns, and whole ids.  `--output` chooses another form.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from forkd.cli import render
from forkd.cli.context import shared
from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

T = TypeVar("T")

ID_CHARS_MIN = 12
"""Characters of an id that are shown, or more where ids of one list begin alike."""

FOLDED_CHARS = 29
"""Characters of a cell that stay on one line while there are minor columns to leave out: an id."""

FOLDED_CHARS_MIN = 12
"""Width of the narrowest column whose cells have further lines."""

FOLD_AFTER = frozenset("/-_.:,@=")
"""Characters after which a word that is longer than a line is continued on the next one."""

TEMPLATE_CHARS_MAX = 4_096
"""Longest template of `--output`."""

GAP = 2
"""Spaces between two columns."""

NAMED = ("wide", "json", "jsonl")
"""Formats that have a name; any other is a template."""

_FIELD = re.compile(r"\{([^{}]*)\}")
_ESCAPES = {r"\n": "\n", r"\t": "\t"}


@dataclass(frozen=True)  # no slots: a generic class has an attribute of its own
class Column(Generic[T]):
    """A column of a list.

    Attributes:
        title: Its heading.
        cell: What a row has in it; None is a dash.
        wide: Only shown with `--output wide`.
        optional: Only shown if some row has a value.
        short: It holds ids, which are shown in part.
        right: Numbers, which end in the same place.
        minor: A narrow terminal leaves it out before any column that is not.
    """

    title: str
    cell: Callable[[T], object]
    wide: bool = False
    optional: bool = False
    short: bool = False
    right: bool = False
    minor: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    """The form of a result.

    Attributes:
        kind: `table`, `wide`, `json`, `jsonl` or `template`.
        template: Text with fields, such as `{id} {status}`.
    """

    kind: str = "table"
    template: str = ""

    @property
    def is_table(self) -> bool:
        """Whether people read it."""
        return self.kind in {"table", "wide"}


def chosen(output: str | None, *, as_json: bool) -> Format:
    """Return the form that `--output` and `--json` ask for.

    Raises:
        InvalidRequest: It is neither a format's name nor a template, or both options are given.
    """
    if as_json:
        if output not in {None, "json"}:
            raise InvalidRequest("--json and --output exclude each other", field="output")
        shared.as_json = True
        return Format("json")
    if output is None or output in NAMED:
        shared.as_json = output in {"json", "jsonl"}
        return Format(output or "table")
    if _FIELD.search(output) is None:
        raise InvalidRequest(
            f"--output: {output!r} is not a format; write wide, json, jsonl or a template such as "
            "'{id} {status}'",
            field="output",
        )
    if len(output) > TEMPLATE_CHARS_MAX:
        raise InvalidRequest(
            f"--output: a template has at most {TEMPLATE_CHARS_MAX} characters", field="output"
        )
    return Format("template", output)


def show(
    items: Sequence[T],
    columns: Sequence[Column[T]],
    form: Format,
    *,
    whole_ids: bool = False,
) -> None:
    """Print a list.

    Raises:
        InvalidRequest: A template names a field that the items do not have.
    """
    whole_ids = whole_ids or render.terminal_width() is None
    if form.is_table:
        _table(items, _shown(items, columns, wide=form.kind == "wide"), form, whole_ids=whole_ids)
    elif form.kind == "json":
        render.document(list(items))
    else:
        for each in items:
            _line(each, form)


def detail(item: object, labels: Sequence[tuple[str, object]], form: Format) -> None:
    """Print one thing: a line for each label that has a value."""
    if form.is_table:
        left = max((len(label) for label, _ in labels), default=0) + 1 + GAP
        width = None if form.kind == "wide" else render.terminal_width()
        for label, value in labels:
            if value not in {None, ""}:
                text = _clean(value)
                room = max(_cells(text) if width is None else width - left, FOLDED_CHARS_MIN)
                lines = f"\n{' ' * left}".join(folded(text, room))
                sys.stdout.write(f"{f'{label}:':<{left}}{lines}\n")
    elif form.kind == "json":
        render.document(item)
    else:
        _line(item, form)


def _line(item: object, form: Format) -> None:
    members = render.plain(item)
    text = json.dumps(members, separators=(",", ":"))
    if form.kind == "template":
        text = filled(form.template, members if isinstance(members, dict) else {})
    sys.stdout.write(f"{text}\n")


def filled(template: str, members: Mapping[str, Any]) -> str:
    """Return a template with its fields filled in.

    Raises:
        InvalidRequest: It names a field that there is none of.
    """
    for escape, character in _ESCAPES.items():
        template = template.replace(escape, character)
    return _FIELD.sub(lambda found: _field(found[1].strip(), members), template)


def _field(path: str, members: Mapping[str, Any]) -> str:
    value: Any = members
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            if isinstance(value, dict) and value is not members:
                return "-"  # a label that this one has not
            known = ", ".join(members)
            raise InvalidRequest(
                f"--output: there is no field {path!r}; there are: {known}", field="output"
            )
        value = value[name]
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Return each id's beginning, long enough to be the only one that begins so."""
    known = dict.fromkeys(ids)
    length = ID_CHARS_MIN
    while len({each[:length] for each in known}) < len(known):
        length += 1
    return {each: each[:length] for each in known}


def _shown(items: Sequence[T], columns: Sequence[Column[T]], *, wide: bool) -> list[Column[T]]:
    return [
        each
        for each in columns
        if (wide or not each.wide)
        and (not each.optional or any(each.cell(item) not in {None, ""} for item in items))
    ]


def _table(
    items: Sequence[T], columns: Sequence[Column[T]], form: Format, *, whole_ids: bool
) -> None:
    cells = [[each.cell(item) for each in columns] for item in items]
    if not whole_ids:
        for place, column in enumerate(columns):
            if column.short:
                known = short_ids(str(row[place]) for row in cells if row[place] is not None)
                for row in cells:
                    row[place] = known.get(str(row[place]), row[place])
    rows = [[_clean(each) for each in row] for row in cells]
    width = None if form.kind == "wide" else render.terminal_width()
    for line in drawn(columns, rows, width, bold=_is_bright()):
        sys.stdout.write(f"{line}\n")


def drawn(
    columns: Sequence[Column[Any]],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    bold: bool = False,
) -> list[str]:
    """Return the lines of a table that is at most `width` wide."""
    natural = [
        max([_cells(column.title), *(_cells(row[place]) for row in rows)])
        for place, column in enumerate(columns)
    ]
    widths = fitted(columns, natural, width)
    head, *body = [
        _lines(columns, row, widths) for row in ([each.title for each in columns], *rows)
    ]
    titles = [f"\x1b[1m{line}\x1b[0m" if bold else line for line in head]
    return [*titles, *(line for lines in body for line in lines)]


def fitted(
    columns: Sequence[Column[Any]], natural: Sequence[int], width: int | None
) -> dict[int, int]:
    """Return the places of the columns that have room, and how wide each is.

    Args:
        columns: All columns.
        natural: How wide each would be.
        width: How wide the table may be; None if nothing limits it.
    """
    if width is None:
        return dict(enumerate(natural))
    kept = {place: _bounds(column, natural[place]) for place, column in enumerate(columns)}
    for place in reversed([*kept]):
        if columns[place].minor and _narrowed(kept, FOLDED_CHARS, width) is None:
            del kept[place]
    for place in reversed([*kept]):
        if len(kept) > 1 and _narrowed(kept, FOLDED_CHARS_MIN, width) is None:
            del kept[place]
    for least in (FOLDED_CHARS, FOLDED_CHARS_MIN):
        found = _narrowed(kept, least, width)
        if found is not None:
            return found
    return {place: max(width, 2) for place in kept}  # one is left; 2, for the widest character


def _bounds(column: Column[Any], natural: int) -> tuple[int, int]:
    """Return how narrow and how wide a column may be; ids and numbers stay on one line."""
    fixed = column.short or column.right
    return (natural if fixed else _cells(column.title)), natural


def _narrowed(
    bounds: Mapping[int, tuple[int, int]], least: int, width: int
) -> dict[int, int] | None:
    """Return widths with which columns fit, as even as they can be; None if there are none.

    No column is narrower than `least`, unless what is in it is.
    """
    room = width - GAP * (len(bounds) - 1)
    for most in range(max(width, least), least - 1, -1):
        widths = {place: min(wide, max(narrow, most)) for place, (narrow, wide) in bounds.items()}
        if sum(widths.values()) <= room:
            return widths
    return None


def _lines(
    columns: Sequence[Column[Any]], row: Sequence[str], widths: Mapping[int, int]
) -> list[str]:
    """Return a row, with further lines for cells that are wider than their columns."""
    cells = [folded(row[place], width) for place, width in widths.items()]
    lines = []
    for pieces in zip_longest(*cells, fillvalue=""):
        padded = []
        for piece, (place, width) in zip(pieces, widths.items(), strict=True):
            blank = " " * (width - _cells(piece))
            padded.append(f"{blank}{piece}" if columns[place].right else f"{piece}{blank}")
        lines.append((" " * GAP).join(padded).rstrip())
    return lines


def folded(text: str, width: int) -> list[str]:
    """Return text in lines of at most `width`, whole words where a word is no longer than that."""
    if _cells(text) <= width:
        return [text]
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if _cells(longer) <= width:
            lines[-1] = longer
            continue
        pieces = _pieces(word, width)
        lines = [*lines, *pieces] if lines[-1] else [*lines[:-1], *pieces]
    return lines


def _pieces(word: str, width: int) -> list[str]:
    """Return a word in pieces that have room, broken after a punctuation mark if one is near."""
    pieces = []
    while _cells(word) > width:
        count = next(n for n in range(width, 0, -1) if n == 1 or _cells(word[:n]) <= width)
        near = range(count, count // 3, -1)
        count = next((n for n in near if word[n - 1] in FOLD_AFTER), count)
        pieces.append(word[:count])
        word = word[count:]
    return [*pieces, word] if word else pieces


def _cells(text: str) -> int:
    """Return how many places of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415 - few texts need it

    return cell_len(text)


def _clean(value: object) -> str:
    """Return a cell's text; nothing in it can act on a terminal."""
    text = "-" if value is None or value == "" else str(value)
    return "".join(each if each.isprintable() else "?" for each in text)


def _is_bright() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ


def time_shown(unix: float) -> str:
    """Return a time as people read it, in the time zone of this host."""
    return f"{datetime.fromtimestamp(unix, UTC).astimezone():%Y-%m-%d %H:%M:%S %Z}"
