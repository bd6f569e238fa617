"""Examples in documentation run, as they stand.

A fenced block is marked by what follows its language:

    python test     runs against a daemon in memory; the blocks of a page share their names
    python machine  runs on real machines alone, where its programs have files and a shell
    toml recipe     is a recipe that loads
    sh              its `forkd` commands have the words and options that the command has

tests/functional/test_docs_machines.py runs the Python on real machines, too.
"""

from __future__ import annotations

import ast
import shlex
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
import typer

import forkd
from forkd.cli.main import app
from forkd.images.recipe import parse_recipe
from tests.support.docs import Block, blocks, page_id, pages, run_python
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemon import RunningDaemon

PAGES = pages()


def marked(info: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, info)]


@pytest.mark.parametrize("page", marked("python test"), ids=page_id)
def test_the_python_of_a_page_runs(
    page: Path, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.service.stored = some_snapshots("numpy")
    monkeypatch.setenv("FORKD_URL", daemon.url)

    run_python(page)


def test_there_are_examples_to_run() -> None:
    assert {page.name for page in marked("python test")} >= {"README.md", "use-the-sdk.md"}


@pytest.mark.parametrize("page", marked("python machine"), ids=page_id)
def test_the_python_that_needs_a_machine_uses_names_that_exist(page: Path) -> None:
    for block in blocks(page, "python machine"):
        tree = ast.parse(block.code)
        for each in ast.walk(tree):
            if isinstance(each, ast.ImportFrom) and each.module == "forkd":
                assert {alias.name for alias in each.names} <= set(dir(forkd))


@pytest.mark.parametrize("page", marked("toml recipe"), ids=page_id)
def test_the_recipes_of_a_page_load(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "toml recipe"):
        recipe = parse_recipe(tomllib.loads(block.code), folder=tmp_path)

        assert recipe.name


@pytest.mark.parametrize("page", marked("sh"), ids=page_id)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    for block in blocks(page, "sh"):
        for words in forkd_commands(block):
            check(words)


def forkd_commands(block: Block) -> list[list[str]]:
    """Return the `forkd` commands of a block, each without its first word."""
    found = []
    for line in block.code.replace("$(", "\n").replace("\\\n", " ").splitlines():
        for part in line.partition(" #")[0].split("&&"):
            words = shlex.split(part.replace('"', " ").replace(")", " "))
            found += [words[1:]] if words[:1] == ["forkd"] else []
    return found


def check(words: list[str]) -> None:
    """Fail unless `words` begin with a command, and its options are that command's."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "commands"):
        while rest and rest[0].startswith("-"):
            (option,) = [each for each in command.params if rest[0] in each.opts]
            del rest[: 1 if option.is_flag else 2]
        assert rest, f"forkd {shlex.join(words)}: a command is missing"
        assert rest[0] in command.commands, f"forkd {shlex.join(words)}: no such command"
        command = command.commands[rest.pop(0)]
    own = rest[: rest.index("--")] if "--" in rest else rest
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    unknown = [word for word in own if word.startswith("-") and word != "-" and word not in known]
    unknown = [word for word in unknown if not {f"-{letter}" for letter in word[1:]} <= known]
    assert unknown == [], f"forkd {shlex.join(words)}: no such option"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("forkd up", [["up"]]),
        ("make build && forkd down    # ends it", [["down"]]),
        ("id=$(forkd fork numpy -n 2)", [["fork", "numpy", "-n", "2"]]),
        ('forkd eval "$(forkd fork numpy)" 1', [["eval"], ["fork", "numpy", "1"]]),
        ("make test", []),
    ],
)
def test_commands_are_found_in_a_shells_words(line: str, found: list[list[str]]) -> None:
    assert forkd_commands(Block("sh", line, 1)) == found


@pytest.mark.parametrize("words", [["forc"], ["snapshot", "forget"], ["fork", "numpy", "--many"]])
def test_a_command_that_does_not_exist_is_found_out(words: list[str]) -> None:
    with pytest.raises(AssertionError):
        check(words)
