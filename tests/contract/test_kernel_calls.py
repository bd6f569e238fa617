"""Only `forkd.host` asks the kernel: what the linter's list of modules cannot see.

The linter refuses modules (`banned-api` in pyproject.toml).  A `pathlib.Path` is everywhere, and
only some of what it does asks the kernel; nor does `open` need to be imported.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import forkd

PACKAGE = Path(forkd.__file__).parent

ASKING = {
    "chmod": 1, "cwd": 0, "exists": 0, "expanduser": 0, "glob": 1, "group": 0, "hardlink_to": 1,
    "home": 0, "is_block_device": 0, "is_char_device": 0, "is_dir": 0, "is_fifo": 0, "is_file": 0,
    "is_junction": 0, "is_mount": 0, "is_socket": 0, "is_symlink": 0, "iterdir": 0, "lchmod": 1,
    "link_to": 1, "lstat": 0, "mkdir": 3, "open": 5, "owner": 0, "read_bytes": 0, "read_text": 3,
    "readlink": 0, "rename": 1, "replace": 1, "resolve": 1, "rglob": 1, "rmdir": 0, "samefile": 1,
    "stat": 0, "symlink_to": 2, "touch": 2, "unlink": 1, "walk": 3, "write_bytes": 1,
    "write_text": 4,
}  # fmt: skip
"""Methods of a path that ask the kernel, and how many arguments without a name they take: others'
methods of the same name take more."""

PURE = {
    "absolute", "as_posix", "as_uri", "is_absolute", "is_relative_to", "is_reserved", "joinpath",
    "match", "relative_to", "with_name", "with_segments", "with_stem", "with_suffix",
}  # fmt: skip
"""Methods of a path that do not."""

EXCEPTIONS = {
    "host/": "the callers of the kernel",
    "cli/": "the client side, which may not load forkd.host",
    "executor/": "the client side, and what runs in guests",
    "mcp/": "the client side, which may not load forkd.host",
    "listeners.py": "both sides load it",
    "machine/": "the client side, which may not load forkd.host",
    "sdk/": "the client side, which may not load forkd.host",
    "testing/": "the client side, which may not load forkd.host",
    "packs/cosign.py": "the client side, which names what it cannot read",
    "packs/keys.py": "both sides load it",
    "packs/reader.py": "in a process of its own, which is told that it failed",
    "packs/writer.py": "in a process of its own, which is told that it failed",
    "programs.py": "both sides load it",
    "registry/credentials.py": "both sides load it, and name what it cannot read",
}
"""Where paths are asked all the same, and why."""


def calls(source: str) -> list[str]:
    """Return each call in a module that asks the kernel through a path, or `open`."""
    tree = ast.parse(source)
    named = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    } - {"Path"}
    every = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [f"line {each.lineno}: {ast.unparse(each.func)}" for each in every if _asks(each, named)]


def _asks(call: ast.Call, imported: set[str]) -> bool:
    match call.func:
        case ast.Name("open"):
            return True
        case ast.Attribute(ast.Name(owner), _) if owner in {*imported, "self", "cls"}:
            return False  # a function of a module, or a method of ours
        case ast.Attribute(_, method) if method in ASKING:
            return len(call.args) <= ASKING[method]
    return False


def modules() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("module", modules())
def test_no_path_is_asked_outside_of_host(module: str) -> None:
    found = calls((PACKAGE / module).read_text())

    assert not found or module.startswith(tuple(EXCEPTIONS)), "call a function of forkd.host"


def test_each_exception_is_needed() -> None:
    asking = [each for each in modules() if calls((PACKAGE / each).read_text())]

    assert [each for each in EXCEPTIONS if not any(m.startswith(each) for m in asking)] == []


def test_each_method_of_a_path_is_decided() -> None:
    methods = {each for each in dir(Path) if each[0] != "_" and callable(getattr(Path, each))}

    assert methods <= ASKING.keys() | PURE


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("path.exists()", True),
        ("(folder / 'x').read_text()", True),
        ("Path.home()", True),
        ("path.parent.mkdir(parents=True, exist_ok=True)", True),
        ("old.replace(new)", True),
        ("open(path)", True),
        ("name.replace('a', 'b')", False),
        ("files.is_file(path)", False),
        ("guests.stat(caller, sandbox, path)", False),
        ("path.with_suffix('.x')", False),
    ],
)
def test_a_call_is_seen_for_what_it_is(line: str, seen: bool) -> None:  # noqa: FBT001
    source = f"from pathlib import Path\nfrom forkd.host import files\n{line}\n"

    assert bool(calls(source)) == seen
