"""Lists and details as people or programs read them.

A table fits its terminal: columns that have no room are left out from the right, and no cell is
ever cut.  A pipe gets all default columns, and whole ids.  `--output` chooses another form.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from forkd.cli import render
from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

T = TypeVar("T")

ID_CHARS_MIN = 12
"""Characters of an id that are shown, or more where ids of one list begin alike."""

WRAPPED_MIN = 29
"""Narrowest column that has further lines where a terminal is too narrow: a whole id."""

TEMPLATE_CHARS_MAX = 4_096
"""Longest template of `--output`."""

COLUMNS_UNKNOWN = 80
"""Width of a terminal that does not say, as one on a serial line does not."""

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
        wrap: It has further lines in a narrow terminal; the last column only.
    """

    title: str
    cell: Callable[[T], object]
    wide: bool = False
    optional: bool = False
    short: bool = False
    right: bool = False
    wrap: bool = False


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
        return Format("json")
    if output is None or output in NAMED:
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
    whole_ids = whole_ids or terminal_width() is None
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
        width = terminal_width()
        for label, value in labels:
            if value not in {None, ""}:
                text = _clean(value)
                room = max(_cells(text) if width is None else width - left, 1)
                lines = f"\n{' ' * left}".join(_wrapped(text, room))
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
    width = None if form.kind == "wide" else terminal_width()
    for line in drawn(columns, rows, width, bold=_is_bright()):
        sys.stdout.write(f"{line}\n")


def drawn(
    columns: Sequence[Column[Any]],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    bold: bool = False,
) -> list[str]:
    """Return the lines of a table that is at most `width` wide, if one column can be."""
    widths = [
        max([_cells(column.title), *(_cells(row[place]) for row in rows)])
        for place, column in enumerate(columns)
    ]
    kept = columns_that_fit(columns, widths, width)
    if width is not None and kept and columns[kept - 1].wrap:
        used = sum(widths[: kept - 1]) + GAP * (kept - 1)
        widths[kept - 1] = min(widths[kept - 1], max(width - used, WRAPPED_MIN))
    titles = [each.title for each in columns[:kept]]
    head = _row(columns, titles, widths[:kept])
    lines = [f"\x1b[1m{head}\x1b[0m" if bold else head]
    for row in rows:
        lines += _lines(columns, row[:kept], widths[:kept])
    return lines


def columns_that_fit(
    columns: Sequence[Column[Any]], widths: Sequence[int], width: int | None
) -> int:
    """Return how many columns have room, counted from the left; at least one."""
    if width is None:
        return len(columns)
    used = -GAP
    for place, needed in enumerate(widths):
        used += GAP + (min(needed, WRAPPED_MIN) if columns[place].wrap else needed)
        if used > width:
            return max(1, place)
    return len(columns)


def _lines(columns: Sequence[Column[Any]], row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return a row, with further lines for what its last column has no room for."""
    if not row or not columns[len(row) - 1].wrap:
        return [_row(columns, row, widths)]
    pieces = _wrapped(row[-1], widths[-1])
    lines = [_row(columns, [*row[:-1], pieces[0]], widths)]
    blank = " " * (sum(widths[:-1]) + GAP * (len(widths) - 1))
    return [*lines, *(blank + each for each in pieces[1:])]


def _wrapped(text: str, width: int) -> list[str]:
    """Return text in lines; a word that is longer than a line is not cut."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and _cells(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _row(columns: Sequence[Column[Any]], row: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, cell, width in zip(columns, row, widths, strict=False):
        blank = " " * (width - _cells(cell))
        padded.append(f"{blank}{cell}" if column.right else f"{cell}{blank}")
    return (" " * GAP).join(padded).rstrip()


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


def terminal_width() -> int | None:
    """Return how wide standard output is; None for what is no terminal."""
    if not sys.stdout.isatty():
        return None
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and int(said) > 0:
        return int(said)
    return os.get_terminal_size(sys.stdout.fileno()).columns or COLUMNS_UNKNOWN


def _is_bright() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ


def time_shown(unix: float) -> str:
    """Return a time as people read it, in the time zone of this host."""
    return f"{datetime.fromtimestamp(unix, UTC).astimezone():%Y-%m-%d %H:%M:%S %Z}"
