"""Hold the repository to its budgets and its words.

    python tools/check_repo.py         one line for each finding; fails if there is any

Budgets bound how much a reader must hold in mind: lines of a function, of a
class of the package, and of a file.  Words are those that age badly (plans, and
marks without an issue) and names of package registries, which belong to whoever
installs.  What may exceed a limit is listed in `EXCEPTIONS`, each with its
reason, and an entry that is no longer needed is a finding, too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parent.parent

FUNCTION_LINES_MAX = 70
CLASS_LINES_MAX = 300
PYTHON_LINES_MAX = 600
RUST_LINES_MAX = 700
FRONT_LINES_MAX = 100
LINE_WIDTH_MAX = 100

FRONT_FILES = ("main.py", "main.rs")
"""Files that parse, call one function and render; they rot first."""

EXCEPTIONS: dict[str, str] = {
    "src/forkd/sdk/_async/sandbox.py:AsyncSandbox": "names and documents each option of a fork",
    "src/forkd/sdk/_sync/sandbox.py:Sandbox": "generated from it",
}
"""`path` or `path:function` -> why it may exceed its limit."""

HOSTS = (
    "pypi.org",
    "pythonhosted.org",
    "static.crates.io",
    "index.crates.io",
    "registry.npmjs.org",
)
"""Package registries; naming one in a file fixes where everybody installs from."""

BANNED = {
    re.compile(r"\bTODO\b(?!\(#\d+\))"): "a TODO names an issue, as TODO(#123), or is not there",
    re.compile(r"\b(FIXME|XXX|HACK)\b"): "say what is wrong in a sentence, or mend it",
    re.compile(r"\bfor now\b", re.IGNORECASE): "a plan in the code; plans are issues",
    re.compile(r"\bphase \d", re.IGNORECASE): "a plan in the code; plans are issues",
    re.compile(r"#!?\[allow\("): "use #[expect(…, reason = …)]",
    re.compile(r"#\s*noqa(?!: [A-Z])"): "name the one rule, and give the reason",
    re.compile(r"#\s*type: ignore(?!\[)"): "name the one rule, and give the reason",
}
"""Patterns that no file of code may contain, and what to do instead."""

CODE = (".py", ".rs", ".sh", ".toml")
UNFORMATTED = (".rs", ".sh")
"""What no formatter holds to the width: shell, and comments in Rust."""

PROSE = (".md",)

UNCHECKED = ("tools/check_repo.py", "tests/unit/test_tools_check_repo.py")
"""These two must spell what they look for."""


def main() -> int:
    """Check every tracked file; return the exit status."""
    files = {path: (ROOT / path).read_text(encoding="utf-8") for path in tracked()}
    findings = [*check(files), *unmirrored(files)]
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    return 1 if findings else 0


def tracked() -> Iterator[str]:
    """Yield the paths of tracked text files that are there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # noqa: S607 - git is wherever it is
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for path in listed.stdout.splitlines():
        if path.endswith((*CODE, *PROSE)) and (ROOT / path).is_file():
            yield path


def check(files: Mapping[str, str], exceptions: Mapping[str, str] = EXCEPTIONS) -> list[str]:
    """Return a line for each finding in `files`, which maps paths to texts."""
    found: dict[str, str] = {}
    words: list[str] = []
    for path, text in files.items():
        if path in UNCHECKED:
            continue
        found.update(_sizes(path, text))
        words.extend(_words(path, text))
    needless = [f"{name}: needs no exception any more" for name in exceptions if name not in found]
    return [line for name, line in found.items() if name not in exceptions] + words + needless


def unmirrored(files: Mapping[str, str]) -> list[str]:
    """Return a line for each unit test file that names no package of src/forkd or tools."""
    subjects = {Path(path).parts[2].removesuffix(".py") for path in files
                if path.startswith("src/forkd/")} | {"support", "tools", "benchmarks"}  # fmt: skip
    return [
        f"{path}: is named after no package; tests/unit mirrors src/forkd"
        for path in files
        if re.match(r"tests/unit/test_\w+\.py$", path)
        and not any(Path(path).stem.removeprefix("test_").split("_")[0] == s for s in subjects)
    ]


def _sizes(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield what exceeds a budget, by the name an exception would use."""
    lines = text.splitlines()
    if path.endswith(".py"):
        yield from _over(path, len(lines), PYTHON_LINES_MAX)
        for name, length in _python_functions(text):
            yield from _over(f"{path}:{name}", length, FUNCTION_LINES_MAX)
        if path.startswith("src/"):
            for name, length in _python_classes(text):
                yield from _over(f"{path}:{name}", length, CLASS_LINES_MAX)
    elif path.endswith(".rs"):
        body = _without_tests(path, lines)
        yield from _over(path, len(body), RUST_LINES_MAX)
        for name, length in _rust_functions(body):
            yield from _over(f"{path}:{name}", length, FUNCTION_LINES_MAX)
    if path.startswith(("src/", "crates/")) and Path(path).name in FRONT_FILES:
        yield from _over(path, len(_without_tests(path, lines)), FRONT_LINES_MAX)


def _over(name: str, lines: int, limit: int) -> Iterator[tuple[str, str]]:
    if lines > limit:
        yield name, f"{name}: {lines} lines, at most {limit}"


def _python_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield name and length of each function, without decorators and docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node) is not None:
                length -= (first.end_lineno or first.lineno) - first.lineno + 1
            yield node.name, length


def _python_classes(text: str) -> Iterator[tuple[str, int]]:
    """Yield name and length of each class."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def _rust_functions(lines: list[str]) -> Iterator[tuple[str, int]]:
    """Yield name and length of each function: from `fn` to the brace at its own indent."""
    start = re.compile(
        r"^(\s*)(?:pub(?:\([^)]*\))? )?(?:const |async |unsafe |extern \S+ )*fn (\w+)"
    )
    for number, line in enumerate(lines):
        match = start.match(line)
        if match is None or line.rstrip().endswith((";", "}")):
            continue
        end = f"{match[1]}}}"
        for offset, later in enumerate(lines[number:]):
            if later.rstrip() == end:
                yield match[2], offset + 1
                break


def _without_tests(path: str, lines: list[str]) -> list[str]:
    """Return the lines before a Rust file's tests; none of a file that is all tests."""
    if "/tests/" in path or Path(path).name == "tests.rs":
        return []
    for number, line in enumerate(lines):
        if line.strip() == "#[cfg(test)]" and number + 1 < len(lines) \
                and re.match(r"mod \w+ \{", lines[number + 1]):  # fmt: skip
            return lines[:number]
    return lines


def _words(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        for host in HOSTS:
            if host in line:
                yield f"{path}:{number}: names the registry {host}"
        if not path.endswith(CODE):
            continue
        for pattern, advice in BANNED.items():
            if pattern.search(line):
                yield f"{path}:{number}: {advice}"
        if path.endswith(UNFORMATTED) and len(line) > LINE_WIDTH_MAX and "://" not in line:
            yield f"{path}:{number}: {len(line)} columns, at most {LINE_WIDTH_MAX}"


if __name__ == "__main__":
    sys.exit(main())
