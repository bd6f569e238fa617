"""Look for what readers stumble over: phrases of `tools/prose.toml`, and sentences too long.

    python -m tools.prose          one line for each finding; fails if there is any
    python -m tools.prose --long   the longest sentences of each page

Checked are the pages for users, help texts, and the sentences of errors.  Decisions, contracts and
the changelog are history, or for developers, and keep their words.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
RULES: dict[str, Any] = tomllib.loads((ROOT / "tools/prose.toml").read_text(encoding="utf-8"))

FOLDERS = ("docs/howto", "docs/tutorial", "docs/explanation", "docs/reference")
FILES = ("README.md", "SECURITY.md", "docs/install.md", "docs/quickstart.md", "docs/faq.md")
GENERATED = ("cli.md", "limits-all.md", "metrics.md")
"""Pages that repeat texts of the code."""

LONGEST_SHOWN = 20

FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z])|\n\s*\n")
MARKS = ("#", "|", "- ", "* ", "<!--", "    ")
"""What begins a line that is no part of a paragraph before it."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text that a user reads.

    Attributes:
        place: Where it is: a path, and a line or a name.
        words: The text.
        heading: Whether it is one.
    """

    place: str
    words: str
    heading: bool = False


def main() -> int:
    """Print the findings, or the longest sentences; return the exit status."""
    if "--long" in sys.argv[1:]:
        found = sorted(lengths(texts()), reverse=True)
        for length, place, sentence in found[:LONGEST_SHOWN]:
            sys.stdout.write(f"{length:4} {place}: {sentence[:120]}\n")
        return 0
    findings = check(list(texts()))
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    return 1 if findings else 0


def check(read: list[Text], rules: dict[str, Any] = RULES) -> list[str]:
    """Return a line for each finding, and for each exception that is not needed."""
    found: list[tuple[str, str]] = []
    for text in read:
        found += [(text.place, f"{said!r}: say {better}") for said, better in phrases(text, rules)]
        if text.heading and (long := len(text.words.split())) > rules["heading_words_max"]:
            found.append((text.place, f"a heading of {long} words: {text.words}"))
    for length, place, sentence in lengths(read):
        if length > rules["sentence_words_max"]:
            found.append((place, f"a sentence of {length} words: {sentence[:60]}…"))
    excused = dict.fromkeys(rules["exceptions"], False)
    left = []
    for place, finding in found:
        path = place.partition(":")[0]
        if path in excused:
            excused[path] = True
        else:
            left.append(f"{place}: {finding}")
    needless = [path for path, used in excused.items() if not used]
    return left + [f"{path}: needs no exception any more" for path in needless]


def phrases(text: Text, rules: dict[str, Any] = RULES) -> Iterator[tuple[str, str]]:
    """Yield what a text says that it should not, and what to say."""
    for pattern, better in rules["phrases"].items():
        for match in re.finditer(pattern, text.words, re.IGNORECASE):
            yield match[0], better


def lengths(read: Iterator[Text] | list[Text]) -> Iterator[tuple[int, str, str]]:
    """Yield each sentence with its number of words and its place."""
    for text in read:
        for sentence in SENTENCE.split(text.words):
            words = " ".join(sentence.split())
            yield len(words.split()), text.place, words


def texts() -> Iterator[Text]:
    """Yield everything that is checked."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.md"))]
    for path in [*(ROOT / name for name in FILES), *paths]:
        if path.name not in GENERATED:
            name = str(path.relative_to(ROOT))
            yield from page_texts(name, path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "src/forkd").rglob("*.py")):
        if "_sync" not in path.parts:
            yield from code_texts(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))


def page_texts(name: str, page: str) -> Iterator[Text]:
    """Yield the paragraphs, list entries, cells and headings of a page."""
    plain = LINK.sub(r"\1", CODE.sub("X", FENCE.sub(lambda each: "\n" * each[0].count("\n"), page)))
    block: list[str] = []
    begin = 1
    for number, line in enumerate([*plain.splitlines(), ""], start=1):
        if block and (not line.strip() or line.lstrip().startswith(MARKS)):
            yield Text(f"{name}:{begin}", "\n".join(block))
            block = []
        if line.startswith("#"):
            yield Text(f"{name}:{number}", line.lstrip("# "), heading=True)
        elif line.startswith("|"):
            for cell in line.strip("| ").split(" | "):
                yield Text(f"{name}:{number}", cell)
        elif line.strip() and not line.startswith("<!--"):
            begin = begin if block else number
            block.append(line.lstrip("-* "))


def code_texts(name: str, source: str) -> Iterator[Text]:
    """Yield the sentences of errors that a module raises, and the help of its commands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for words in said(node.exc.args[:1]):
                yield Text(f"{name}:{node.lineno}", words)
        elif isinstance(node, ast.FunctionDef) and "/cli/" in name and node.decorator_list:
            yield Text(f"{name}:{node.lineno}", ast.get_docstring(node) or "")


def said(values: list[ast.expr]) -> Iterator[str]:
    """Yield the strings of expressions, with `x` for what is put into them."""
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value
        elif isinstance(value, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else "x" for each in value.values)
            yield "".join(str(part) for part in parts)


if __name__ == "__main__":
    sys.exit(main())
