"""What documentation says, for tests that compare it with what is."""

from __future__ import annotations

import json
import os
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]

_UNREAD = {"build", "target", "fuzz/target", "sdk/typescript/node_modules"}

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]\n]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page.

    Attributes:
        info: What stands behind the opening fence, such as `python test`.
        code: What is in it.
        line: Where it begins, counted from 1.
    """

    info: str
    code: str
    line: int


def pages() -> list[Path]:
    """Return every page of the repository, by path.

    Folders of what is built are never looked into: a compiler may be at work there.
    """
    found = []
    for folder, inner, names in os.walk(ROOT):
        here = Path(folder)
        inner[:] = [name for name in inner if not _is_foreign((here / name).relative_to(ROOT))]
        found += [here / name for name in names if name.endswith(".md")]
    return sorted(path for path in found if not _is_foreign(path.relative_to(ROOT)))


def page_id(path: Path) -> str:
    """Return a page's name in the name of a test."""
    return str(path.relative_to(ROOT))


def blocks(path: Path, info: str) -> list[Block]:
    """Return the fenced blocks of a page that are marked `info`."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(info, each["code"], text.count("\n", 0, each.start("code")) + 1)
        for each in _FENCE.finditer(text)
        if each["info"].strip() == info
    ]


def commands(path: Path) -> dict[str, list[str]]:
    """Return what a page has its reader type into a shell, by the headings above it.

    These are the lines behind a prompt in blocks that are marked `console`.
    """
    text = path.read_text(encoding="utf-8")
    text = _FENCE.sub(lambda each: "\n" * each[0].count("\n"), text)
    headings = {text.count("\n", 0, each.start()): each["text"] for each in _HEADING.finditer(text)}
    found: dict[str, list[str]] = {}
    for block in blocks(path, "console"):
        heading = headings[max(line for line in headings if line < block.line)]
        lines = [line[2:] for line in block.code.splitlines() if line.startswith(("# ", "$ "))]
        found.setdefault(heading, []).extend(lines)
    return found


def run_python(
    path: Path, *, info: str = "python test", replaced: Mapping[str, str] | None = None
) -> None:
    """Run the blocks of a page that are marked `info`, which share their names, one by one.

    They find a daemon as any program does.

    Args:
        path: The page.
        info: What stands behind their opening fences.
        replaced: What stands in their code, and what runs in its place.
    """
    names: dict[str, Any] = {"__name__": "example"}
    for block in blocks(path, info):
        code = block.code
        for text, other in (replaced or {}).items():
            code = code.replace(text, other)
        # Empty lines before it, so that a traceback names the line of the page.
        source = "\n" * (block.line - 1) + code
        exec(compile(source, str(path), "exec"), names)  # noqa: S102 - our own documentation


def prose(path: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def links(path: Path) -> list[str]:
    """Return what the links of a page lead to."""
    return [each["target"] for each in _LINK.finditer(prose(path))]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    return {_anchor(each["text"]) for each in _HEADING.finditer(prose(path))}


def _anchor(heading: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def _is_foreign(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return hidden or any(path.is_relative_to(each) for each in _UNREAD)


def tries_in(title: str) -> set[tuple[str, str]]:
    """Return the tries that a section of captive-tries.md lists as refused, with their groups."""
    text = (ROOT / "docs/reference/captive-tries.md").read_text(encoding="utf-8")
    section, _, _ = text.partition(f"## {title}\n")[2].partition("\n## ")
    header, *groups = re.findall(r"^\| (\w+) \| (.+) \|$", section, re.MULTILINE)
    assert header == ("of", "tries")
    return {(group, each) for group, tries in groups for each in tries.split("; ")}


EXAMPLES = ROOT / "examples"


def load_example(name: str, *, replaced: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the names of a program in examples/, as if it were imported."""
    return load_program(EXAMPLES / f"{name}.py", replaced=replaced)


def load_program(path: Path, *, replaced: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the names of a program, as if it were imported."""
    code = path.read_text(encoding="utf-8")
    for text, other in (replaced or {}).items():
        code = code.replace(text, other)
    module = types.ModuleType(f"{path.parent.name}_{path.stem}")
    sys.modules[module.__name__] = module  # where dataclasses look for their annotations
    exec(compile(code, str(path), "exec"), module.__dict__)  # noqa: S102 - our own program
    return module.__dict__


def notebook_code() -> str:
    """Return the code of the notebook in examples/, all cells after one another."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = ("".join(each["source"]) for each in notebook["cells"] if each["cell_type"] == "code")
    return "\n".join(cells)
