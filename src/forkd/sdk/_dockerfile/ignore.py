"""`.dockerignore`, by Docker's rules.

Each line is a pattern of paths below the context; a file is left out if the last pattern that
matches it, or a folder above it, does not begin with `!`.  `*` and `?` match within one name, `**`
any number of folders; `#` begins a comment.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from forkd.sdk._dockerfile import limits
from forkd.sdk._dockerfile.faults import wrong


@dataclass(frozen=True, slots=True)
class Pattern:
    """One line.

    Attributes:
        line: Where it is, from 1.
        text: As it is written.
        brings_back: Whether it begins with `!`.
        regex: What it matches.
    """

    line: int
    text: str
    brings_back: bool
    regex: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Ignore:
    """What is left out of a context.

    Attributes:
        file: What the file is called in errors.
        patterns: Its lines.
    """

    file: str = ".dockerignore"
    patterns: tuple[Pattern, ...] = ()

    def rule(self, path: str) -> Pattern | None:
        """Return the line that leaves a path out; None if it is not left out."""
        last = None
        parts = path.split("/")
        heads = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        for pattern in self.patterns:
            if any(pattern.regex.fullmatch(head) for head in heads):
                last = pattern
        return None if last is None or last.brings_back else last

    def may_skip(self, folder: str) -> bool:
        """Whether nothing below a folder can be in the context."""
        if self.rule(folder) is None:
            return False
        return not any(pattern.brings_back for pattern in self.patterns)


def parse_ignore(text: str, file: str) -> Ignore:
    """Return what a file says.

    Raises:
        InvalidRequest: It is too long, or a line is no pattern.
    """
    if len(text.encode()) > limits.DOCKERFILE_BYTES_MAX:
        size_max = limits.DOCKERFILE_BYTES_MAX
        raise wrong(file, 1, f"the file is longer than {size_max} bytes, the most that is read")
    found: list[Pattern] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        said = line.strip()
        if line.startswith("#") or not said:
            continue
        brings_back = said.startswith("!")
        path = posixpath.normpath(said[brings_back:].strip() or ".").lstrip("/")
        if brings_back and path == ".":
            raise wrong(file, number, "'!' alone brings nothing back; name what is not left out")
        if path in {"", "."}:
            continue  # as in Docker, the context itself cannot be left out
        try:
            found.append(Pattern(number, said, brings_back, re.compile(glob(path))))
        except re.error as error:
            raise wrong(file, number, f"{said[:80]!r} is no pattern: {error}") from error
    return Ignore(file, tuple(found))


def glob(pattern: str, *, folders: bool = True) -> str:
    """Return a pattern of paths as a regular expression.

    Args:
        pattern: With `*`, `?`, classes in brackets, and a backslash before what is none of these.
        folders: Whether `**` matches folders; else it is as `*`.
    """
    said, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if folders and pattern.startswith("**", at):
            at += 2
            if pattern.startswith("/", at):
                at += 1
            said += ".*" if at >= len(pattern) else "(?:.*/)?"
            continue
        if char == "[":
            piece, at = _class(pattern, at)
            said += piece
            continue
        if char == "\\" and at + 1 < len(pattern):
            at += 1
            said += re.escape(pattern[at])
        else:
            said += {"*": "[^/]*", "?": "[^/]"}.get(char) or re.escape(char)
        at += 1
    return said


def _class(pattern: str, at: int) -> tuple[str, int]:
    """Return a class of characters as a regular expression, and where it ends."""
    end = pattern.find("]", at + 2)
    if end < 0:
        raise re.error("a [ is not closed")
    inside = pattern[at + 1 : end]
    negated = inside.startswith("^")
    body = inside[negated:].replace("\\", "\\\\").replace("[", "\\[")
    return f"[{'^' if negated else ''}{body}]", end + 1
