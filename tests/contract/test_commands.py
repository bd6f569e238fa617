"""Every command has a help text of the same shape, and the list of commands loads none of them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer

from forkd.cli.commands import LISTED, PANELS
from forkd.cli.help_text import described, flags, summary
from forkd.cli.main import app
from tests.contract.test_docs_examples import check
from tools.gen_docs import walk

ROOT: Any = typer.main.get_command(app)
COMMANDS = dict(walk(ROOT, "forkd"))

HEAVY = {"httpx", "pydantic", "rich", "websockets", "cryptography", "asyncio", "forkd.sdk"}
HEAVY |= {"forkd.machine", "forkd.wire", "forkd.packs", "ssl", "http", "email"}
"""What takes long to load, and is of no use to a help text."""

MODULES_MAX = 250
"""How many modules `forkd --help` may load: there are 180 or so, most of them Python's own."""

TERMINAL_WIDTH = 80


@pytest.mark.parametrize("name", LISTED)
def test_the_list_says_of_a_command_what_its_own_help_says(name: str) -> None:
    command = ROOT.commands[name]

    assert LISTED[name].summary in {"", summary(command)}


def test_each_panel_has_commands_and_each_command_is_in_one() -> None:
    names = [each.name for panel in PANELS.values() for each in panel]

    assert all(PANELS.values())
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_examples_that_it_understands(name: str) -> None:
    examples = described(COMMANDS[name])[1]

    assert examples
    for line in examples:
        for words in of_a_line(line):
            if words[0] == "forkd":
                check(words[1:])
    assert any(line.split("| ")[-1].startswith(name) for line in examples)


def of_a_line(line: str) -> list[list[str]]:
    """Return the commands of a shell's line."""
    words = shlex.shlex(line, posix=True, punctuation_chars="|<>;&")
    words.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("|<>;&"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [each for each in commands if each]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_text_is_a_sentence_and_fits_a_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(TERMINAL_WIDTH))
    assert re.fullmatch(r"[A-Z].*[.)]", summary(COMMANDS[name]))

    with pytest.raises(SystemExit) as ended:
        app([*name.split()[1:], "--help"], prog_name="forkd")

    said = capsys.readouterr().out
    text = said.partition("\nExamples:")[0]
    assert ended.value.code == 0
    assert max(map(len, text.splitlines())) <= TERMINAL_WIDTH
    assert f"Usage: {name} [OPTIONS]" in said
    assert "<" not in text
    for option in COMMANDS[name].params:
        if option.param_type_name == "option" and not option.hidden:
            assert all(flag in text for flag in flags(option))
            assert option.help
            assert option.help.endswith((".", ")", "'."))


def test_a_default_that_is_a_number_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["fork", "--help"], prog_name="forkd")

    assert "Number of sandboxes. [default: 1]" in capsys.readouterr().out


def test_the_list_of_commands_keeps_its_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["--help"], prog_name="forkd")

    said = capsys.readouterr().out
    assert "http[s]://HOST:PORT" in said
    assert all(f"\n{panel}:\n" in said for panel in PANELS)
    assert all(f"\n  {each.name} " in said for each in LISTED.values() if each.summary)


@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_help_loads_no_command_and_little_else(args: list[str]) -> None:
    code = (
        "import sys\nfrom forkd.cli.main import main\n"
        f"sys.argv = ['forkd', *{args}]\n"
        "try:\n    main()\nexcept SystemExit:\n    print('\\n:', *sys.modules)\n"
    )
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.rpartition("\n: ")[2].split())

    assert "forkd.cli.commands" in loaded
    assert loaded & HEAVY == set()
    assert {f"forkd.cli.{each.file}" for each in LISTED.values()} & loaded == set()
    assert len(loaded) < MODULES_MAX
