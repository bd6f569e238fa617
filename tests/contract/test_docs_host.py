"""The commands of docs/howto/set-up-a-host.md print what the page shows.

A block that is marked `console test` has commands behind `$`, each followed by what it prints, or
by a part of that: `…` stands for any lines.  They run in one folder, on a host that the page
describes: nobody has set it up, and `ada` is to use it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forkd.daemon.host_setup import commands
from forkd.host import tuning
from forkd.host.tuning import Seen
from forkd.service.setup import situation
from forkd.service.setup.plan import Device, Situation
from tests.support.docs import ROOT, blocks

PAGE = ROOT / "docs/howto/set-up-a-host.md"

SEEN = Seen(release=(6, 12), memory_mib=64 * 1024, values={"kernel.pid_max": "32768"})

HOST = Situation(
    host=SEEN,
    group=False,
    kvm_gid=104,
    user="ada",
    user_groups=frozenset({"ada"}),
    device=Device(104, "kvm", 0o660),
)

ANY = "…"


@dataclass(frozen=True, slots=True)
class Shown:
    """A command, and the lines that a page shows below it."""

    words: list[str]
    lines: list[str]


def shown(code: str) -> list[Shown]:
    found: list[Shown] = []
    for line in code.splitlines():
        if line.startswith("$ "):
            found.append(Shown(shlex.split(line[2:]), []))
        else:
            found[-1].lines.append(line)
    return found


def agrees(expected: list[str], printed: list[str]) -> bool:
    """Whether lines are as a page shows them."""
    if not expected:
        return not printed
    if expected[0] == ANY:
        return any(agrees(expected[1:], printed[skipped:]) for skipped in range(len(printed) + 1))
    return printed[:1] == expected[:1] and agrees(expected[1:], printed[1:])


def test_the_commands_of_the_page_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("etc/sysctl.d", "var/lib"):
        Path("image-root", folder).mkdir(parents=True)
    monkeypatch.setattr(tuning, "look", lambda: SEEN)
    monkeypatch.setattr(situation, "_live", lambda *_: HOST)
    ran = []

    for each in [each for block in blocks(PAGE, "console test") for each in shown(block.code)]:
        assert each.words[:2] == ["forkd", "host"]
        done = CliRunner().invoke(commands, each.words[2:])

        assert agrees(each.lines, done.output.splitlines()), f"{each.words}: {done.output}"
        ran.append(each.words[2])

    assert ran == ["check", "setup", "setup", "undo", "undo"]
    assert [path for path in Path("image-root").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        (["a"], ["a"]),
        (["a", ANY, "d"], ["a", "b", "c", "d"]),
        (["a", ANY, "d"], ["a", "d"]),
        (["a", ANY], ["a", "b"]),
    ],
)
def test_lines_that_are_not_shown_may_be_any(expected: list[str], printed: list[str]) -> None:
    assert agrees(expected, printed)


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        (["a"], ["b"]),
        (["a"], ["a", "b"]),
        (["a", "b"], ["a"]),
        (["a", ANY, "d"], ["a", "b", "c"]),
    ],
)
def test_another_line_is_found_out(expected: list[str], printed: list[str]) -> None:
    assert not agrees(expected, printed)
