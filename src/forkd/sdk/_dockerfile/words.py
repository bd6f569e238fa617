"""Words of a Dockerfile: variables are replaced, quotes and escapes removed.

$name  ${name}                        its value; empty if it is not set
${name:-word}  ${name-word}           word if it is not set (with the colon: or empty)
${name:+word}  ${name+word}           word if it is set
${name:?word}  ${name?word}           an error with word if it is not set
${name#pattern}  ##  %  %%            without its beginning, or end, that matches
${name/pattern/word}  //              with what matches replaced: once, everywhere
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Names of variables."""

_SPECIAL = re.compile(r"[@*#?$!-]|[0-9]+")


class Expander:
    """Expands words over one set of variables.

    Args:
        escape: The escape character of the Dockerfile.
        variables: What is set.

    Attributes:
        escape: The escape character.
        unknown: Names that a word used and that are not set.
    """

    def __init__(self, escape: str, variables: Mapping[str, str]) -> None:
        self.escape = escape
        self._variables = variables
        self.unknown: set[str] = set()

    def word(self, text: str) -> str:
        """Return a text as one word, blanks included.

        Raises:
            ValueError: A quote or a brace is not closed, or a variable is malformed or missing.
        """
        value, _ = self._until(text, 0, "")
        return value

    def words(self, text: str) -> list[str]:
        """Return the words of a text; blanks in quotes and in values of variables split none."""
        return [self.word(each) for each in raw_words(text, self.escape)]

    def text(self, content: str) -> str:
        """Return a text of several lines with its variables replaced; quotes are left alone.

        Raises:
            ValueError: As `word`.
        """
        said: list[str] = []
        at = 0
        while at < len(content):
            char = content[at]
            if char == "$":
                piece, at = self._variable(content, at + 1)
                said.append(piece)
                continue
            if char == self.escape and content[at + 1 : at + 2] in {"$", self.escape}:
                at += 1
                char = content[at]
            said.append(char)
            at += 1
        return "".join(said)

    def _until(self, text: str, at: int, stops: str) -> tuple[str, int]:
        """Return what is before one of `stops`, or before the end, and where that is."""
        said: list[str] = []
        while at < len(text) and text[at] not in stops:
            char = text[at]
            if char == "'":
                end = text.find("'", at + 1)
                if end < 0:
                    raise ValueError("a single quote (') is not closed")
                said.append(text[at + 1 : end])
                at = end + 1
            elif char == '"':
                piece, at = self._quoted(text, at + 1)
                said.append(piece)
            elif char == "$":
                piece, at = self._variable(text, at + 1)
                said.append(piece)
            elif char == self.escape:
                said.append(text[at + 1 : at + 2])
                at += 2
            else:
                said.append(char)
                at += 1
        return "".join(said), at

    def _quoted(self, text: str, at: int) -> tuple[str, int]:
        """Return what is in double quotes, and where it goes on behind them."""
        said: list[str] = []
        while at < len(text):
            char = text[at]
            if char == '"':
                return "".join(said), at + 1
            if char == "$":
                piece, at = self._variable(text, at + 1)
                said.append(piece)
                continue
            if char == self.escape and text[at + 1 : at + 2] in {'"', "$", self.escape}:
                at += 1
                char = text[at]
            said.append(char)
            at += 1
        raise ValueError('a double quote (") is not closed')

    def _variable(self, text: str, at: int) -> tuple[str, int]:
        """Return the value of a variable whose `$` is passed, and where it goes on."""
        if text[at : at + 1] != "{":
            found = NAME.match(text, at) or _SPECIAL.match(text, at)
            if found is None:
                return "$", at
            return self._value(found[0]) or "", found.end()
        found = NAME.match(text, at + 1) or _SPECIAL.match(text, at + 1)
        if found is None:
            raise ValueError(f"${text[at:][:40]} names no variable")
        name, at = found[0], found.end()
        if text[at : at + 1] == "}":
            return self._value(name) or "", at + 1
        return self._modified(name, text, at)

    def _modified(self, name: str, text: str, at: int) -> tuple[str, int]:
        colon = text[at : at + 1] == ":"
        sign = text[at + colon : at + colon + 1]
        if sign and sign in "-+?":
            word, at = self._until(text, at + colon + 1, "}")
            value = self._tested(name, sign, word, colon=colon)
        elif sign and sign in "#%/" and not colon:
            twice = text[at + 1 : at + 2] == sign
            pattern, at = self._until(text, at + 1 + twice, "/}" if sign == "/" else "}")
            word = ""
            if sign == "/" and text[at : at + 1] == "/":
                word, at = self._until(text, at + 1, "}")
            value = _edited(self._value(name) or "", sign, pattern, word, twice=twice)
        else:
            raise ValueError(f"${{{name}{text[at : at + 2]}…}} is no form of a variable")
        if text[at : at + 1] != "}":
            raise ValueError(f"${{{name} is not closed")
        return value, at + 1

    def _tested(self, name: str, sign: str, word: str, *, colon: bool) -> str:
        value = self._variables.get(name)
        is_set = bool(value) if colon else value is not None
        if sign == "+":
            return word if is_set else ""
        if is_set:
            return value or ""
        if sign == "?":
            self.unknown.add(name)  # a base image may set it
            raise ValueError(f"{name}: {word or 'it is not set'}")
        return word

    def _value(self, name: str) -> str | None:
        value = self._variables.get(name)
        if value is None:
            self.unknown.add(name)
        return value


def _edited(value: str, sign: str, pattern: str, word: str, *, twice: bool) -> str:
    """Return a value without what matches a shell's pattern, or with it replaced."""
    lazy = "" if twice or sign == "/" else "?"
    parts = {"*": f".*{lazy}", "?": "."}
    body = "".join(parts.get(char) or re.escape(char) for char in pattern)
    if sign == "#":
        return re.sub(rf"\A(?s:{body})", "", value, count=1)
    if sign == "%":
        starts = range(len(value) + 1) if twice else range(len(value), -1, -1)
        matches = (at for at in starts if re.fullmatch(rf"(?s:{body})", value[at:]))
        return value[: next(matches, len(value))]
    return re.sub(rf"(?s:{body})", lambda _: word, value, count=0 if twice else 1)


def raw_words(text: str, escape: str) -> Iterator[str]:
    """Yield the words of a text with their quotes and escapes as they are."""
    word, quote, at = "", "", 0
    while at < len(text):
        char = text[at]
        if char == escape and quote != "'":
            word += text[at : at + 2]
            at += 2
            continue
        if not quote and char in " \t\n":
            if word:
                yield word
            word = ""
        else:
            word += char
            if char in "'\"" and quote in {"", char}:
                quote = "" if quote else char
        at += 1
    if word:
        yield word
