"""A Dockerfile's text as instructions, by Docker's rules.

Directives (`# escape=`) come before everything else.  Lines that begin with `#` are comments, also
between the lines of one instruction.  A line whose last character is the escape character goes on
in the next one.  Behind RUN, COPY and ADD, `<<NAME` has the lines up to NAME as a text (a heredoc).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.sdk._dockerfile import limits
from forkd.sdk._dockerfile.faults import wrong
from forkd.sdk._dockerfile.words import Expander, raw_words

if TYPE_CHECKING:
    from collections.abc import Iterator

_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*")
_DIRECTIVES = {"syntax", "escape", "check"}
_HEREDOC = re.compile(r"([0-9]*)<<(-?)([^<]*)")
_KEYWORD = re.compile(r"\s*(\S+)\s*(.*)", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z][A-Za-z0-9-]*)(?:=(.*))?", re.DOTALL)

HEREDOC_KEYWORDS = {"RUN", "COPY", "ADD"}
JSON_KEYWORDS = {"RUN", "CMD", "ENTRYPOINT", "SHELL", "COPY", "ADD", "VOLUME"}
FLAG_KEYWORDS = {"FROM", "RUN", "COPY", "ADD", "HEALTHCHECK"}

SHOWN_CHARS = 200
"""How much of an instruction is shown."""


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A text of several lines.

    Attributes:
        name: What ends it, and the name of the file that a COPY makes of it.
        content: Its lines.
        expands: Whether variables in it are replaced: its name was not in quotes.
        raw: Its lines as they were written, up to its end, for a shell to read.
    """

    name: str
    content: str
    expands: bool
    raw: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        keyword: In capital letters.
        line: Where it begins, from 1.
        flags: Its `--name=value`, in order; None where there is no value.
        rest: What is behind keyword and flags, without comments and line ends.
        words: The strings of its JSON form; None in the other form.
        heredocs: Its texts.
    """

    keyword: str
    line: int
    flags: tuple[tuple[str, str | None], ...]
    rest: str
    words: tuple[str, ...] | None
    heredocs: tuple[Heredoc, ...]

    @property
    def shown(self) -> str:
        """The instruction in one line."""
        flags = (
            f"--{name}" if value is None else f"--{name}={value}" for name, value in self.flags
        )
        text = " ".join(" ".join((self.keyword, *flags, self.rest)).split())
        return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"


def read(text: str, file: str) -> tuple[tuple[Instruction, ...], str]:
    """Return the instructions of a Dockerfile, and its escape character.

    Args:
        text: What is in it.
        file: What it is called in errors.

    Raises:
        InvalidRequest: It is too long, a directive is wrong, or a heredoc is not ended.
    """
    if len(text.encode()) > limits.DOCKERFILE_BYTES_MAX:
        size_max = limits.DOCKERFILE_BYTES_MAX
        raise wrong(file, 1, f"the file is longer than {size_max} bytes, the most that is read")
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    escape = _escape(lines, file)
    found: list[Instruction] = []
    for instruction in _Reader(lines, escape, file).instructions():
        found.append(instruction)
        if len(found) > limits.DOCKERFILE_INSTRUCTIONS_MAX:
            most = limits.DOCKERFILE_INSTRUCTIONS_MAX
            raise wrong(file, instruction.line, f"more than {most} instructions")
    return tuple(found), escape


def _escape(lines: list[str], file: str) -> str:
    """Return the escape character that the directives at the top choose."""
    said: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        found = _DIRECTIVE.fullmatch(line.strip())
        if found is None or (name := found[1].lower()) not in _DIRECTIVES:
            break
        if name in said:
            raise wrong(file, number, f"the directive {name!r} is there twice")
        said[name] = found[2]
        if name == "escape" and found[2] not in {"\\", "`"}:
            raise wrong(file, number, f"escape must be \\ or `, not {found[2]!r}")
    return said.get("escape", "\\")


class _Reader:
    """Reads instructions from lines."""

    def __init__(self, lines: list[str], escape: str, file: str) -> None:
        self._lines = lines
        self._escape = escape
        self._file = file
        self._next = 0
        mark = re.escape(escape)
        self._continues = re.compile(rf"(?:^|(?<=[^{mark}])){mark}[ \t]*$")

    def instructions(self) -> Iterator[Instruction]:
        while self._next < len(self._lines):
            first = self._lines[self._next].strip()
            if not first or first.startswith("#"):
                self._next += 1
                continue
            line = self._next + 1
            yield self._instruction(line, self._joined())

    def _joined(self) -> str:
        """Return an instruction's lines as one."""
        said: list[str] = []
        goes_on = True
        while goes_on and self._next < len(self._lines):
            line = self._lines[self._next]
            self._next += 1
            if said and (not line.strip() or line.lstrip().startswith("#")):
                continue
            end = self._continues.search(line)
            goes_on = end is not None
            said.append(line if end is None else line[: end.start()])
        return "".join(said).strip()

    def _instruction(self, line: int, text: str) -> Instruction:
        found = _KEYWORD.fullmatch(text)
        keyword, rest = ("", "") if found is None else (found[1].upper(), found[2])
        flags: list[tuple[str, str | None]] = []
        if keyword in FLAG_KEYWORDS:
            flags, rest = _flags(rest)
        words = _json(rest) if keyword in JSON_KEYWORDS else None
        if keyword == "HEALTHCHECK":
            form = _KEYWORD.fullmatch(rest)
            words = _json(form[2]) if form else None
        heredocs: tuple[Heredoc, ...] = ()
        if keyword in HEREDOC_KEYWORDS and words is None and "<<" in rest:
            heredocs = tuple(self._heredocs(line, rest))
        return Instruction(keyword, line, tuple(flags), rest, words, heredocs)

    def _heredocs(self, line: int, rest: str) -> Iterator[Heredoc]:
        for word in list(raw_words(rest, self._escape)):
            found = _HEREDOC.fullmatch(word)
            if found is None:
                continue
            try:
                name = Expander(self._escape, {}).word(found[3])
            except ValueError:
                continue
            if name:
                yield self._heredoc(line, name, expands=name == found[3], chomps=bool(found[2]))

    def _heredoc(self, line: int, name: str, *, expands: bool, chomps: bool) -> Heredoc:
        content: list[str] = []
        raw: list[str] = []
        while self._next < len(self._lines):
            each = self._lines[self._next]
            self._next += 1
            raw.append(f"{each}\n")
            each = each.lstrip("\t") if chomps else each
            if each == name:
                return Heredoc(name, "".join(content), expands, "".join(raw))
            content.append(f"{each}\n")
        raise wrong(self._file, line, f"the heredoc <<{name} is cut short: no line is {name}")


def _flags(rest: str) -> tuple[list[tuple[str, str | None]], str]:
    """Return the flags at the beginning of a text, and what is behind them."""
    flags: list[tuple[str, str | None]] = []
    while rest.startswith("--"):
        word, *behind = rest.split(maxsplit=1)
        rest = behind[0] if behind else ""
        if word == "--":
            break
        found = _FLAG.fullmatch(word)
        flags.append((word.removeprefix("--"), None) if found is None else (found[1], found[2]))
    return flags, rest


def _json(text: str) -> tuple[str, ...] | None:
    """Return the strings of a JSON form; None if it is not one, which is no error."""
    if not text.startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        return None
    return tuple(value)
