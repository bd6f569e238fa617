"""Tables in a real pseudo-terminal: they fit it, and no cell is cut."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from forkd import Client
from forkd.cli.tables import Column, drawn, filled, short_ids
from forkd.errors import InvalidRequest
from forkd.model.ids import SandboxId, Tag
from forkd.model.sandbox import ForkOptions
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]

LONG_TAG = "swebench-django-11039"
MANY = 30


@pytest.fixture
def crowd(daemon: RunningDaemon) -> list[str]:
    """Sandboxes with long names, all limits, ends and reasons; snapshots; tokens and secrets."""
    service = daemon.service
    service.stored = some_snapshots("warm", LONG_TAG)
    options = ForkOptions(memory_limit_mib=512, cpu_limit=0.5, pids_limit=64, io_limit_mib_s=20)
    made = []
    for number in range(MANY):
        tag = Tag(LONG_TAG if number % 7 == 0 else "warm")
        sandbox = service.fork_one(tag, options)
        guest = service.running[sandbox.id]
        guest.sandbox = replace(
            guest.sandbox,
            address="10.209.113.214",
            created_at=datetime.now(UTC) - timedelta(minutes=number),
            expires_at=datetime.now(UTC) + timedelta(hours=number + 1),
            exit_reason="memory limit" if number == MANY - 1 else None,
        )
        made.append(str(sandbox.id))
    with Client(daemon.url) as client:
        client.tokens.create("continuous-integration", ["read", "run", "snapshots"])
        client.secrets.set("openai", "sk-a-secret-value", ["api.example.com"], env="OPENAI_API_KEY")
        client.tenants.set_quotas("research", sandboxes=200, memory_mib=65_536)
    return made


@pytest.fixture
def shown(
    forkd: Forkd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., list[str]]]:
    """A function that runs a command whose output is a pseudo-terminal; returns its lines."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("FORKD_KEYS", str(tmp_path / "keys"))
    assert forkd("key", "new", "the-key-of-a-team").code == 0
    assert (
        forkd("context", "add", "continuous-integration", "https://ci.example.com:8889").code == 0
    )
    monkeypatch.delenv("COLUMNS", raising=False)
    opened = []

    def run(columns: int, *args: str) -> list[str]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        settings = termios.tcgetattr(theirs)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        terminal = os.fdopen(theirs, "w", encoding="utf-8")
        opened.append(terminal)
        before = sys.stdout
        monkeypatch.setattr(sys, "stdout", terminal)
        assert forkd(*args).code == 0
        monkeypatch.setattr(sys, "stdout", before)
        terminal.write("\0")
        terminal.flush()
        said = b""
        while not said.endswith(b"\0"):
            said += os.read(ours, 65_536)
        os.close(ours)
        return re.sub(r"\x1b\[\d*m", "", said.decode().rstrip("\0")).splitlines()

    yield run
    for each in opened:
        each.close()


TABLES = (
    ("ls",),
    ("snapshot", "ls"),
    ("snapshot", "info", "warm"),
    ("token", "ls"),
    ("tenant", "ls"),
    ("secret", "ls"),
    ("image", "ls"),
    ("recipe", "ls"),
    ("context", "ls"),
    ("key", "ls"),
    ("top", "--once"),
    ("host",),
)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", TABLES, ids=" ".join)
@pytest.mark.usefixtures("crowd")
def test_a_table_fits_its_terminal(
    shown: Callable[..., list[str]], command: tuple[str, ...], columns: int
) -> None:
    lines = shown(columns, *command)

    assert lines
    assert max(map(len, lines)) <= columns
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("columns", [80, 120])
def test_sandboxes_have_their_columns_and_whole_cells(
    shown: Callable[..., list[str]], crowd: list[str], columns: int
) -> None:
    head, *rows = shown(columns, "ls")

    assert head.split()[:5] == ["ID", "SNAPSHOT", "STATUS", "AGE", "ADDRESS"]
    assert "ENDED BY" in head
    assert len(rows) == MANY
    for row in rows:
        id_, tag, status, *_ = row.split()
        assert sum(each.startswith(id_) for each in crowd) == 1
        assert tag in {"warm", LONG_TAG}
        assert status == "running"
        assert "10.209.113.214" in row


def test_a_narrower_terminal_has_fewer_columns_and_a_tiny_one_has_ids(
    shown: Callable[..., list[str]], crowd: list[str]
) -> None:
    assert shown(64, "ls")[0].split() == ["ID", "SNAPSHOT", "STATUS", "AGE"]
    tiny = shown(5, "ls")
    assert tiny[0] == "ID"
    assert len(tiny) == len(crowd) + 1
    assert {len(each) for each in tiny[1:]} == {12}


def test_ids_are_whole_where_that_is_asked_for_or_a_program_reads(
    forkd: Forkd, shown: Callable[..., list[str]], crowd: list[str]
) -> None:
    assert {line.split()[0] for line in shown(120, "ls", "--no-trunc")[1:]} == set(crowd)
    assert {line.split()[0] for line in forkd("ls").out.splitlines()[1:]} == set(crowd)


def test_wide_has_every_column(shown: Callable[..., list[str]], crowd: list[str]) -> None:
    head, *rows = shown(80, "ls", "-o", "wide")

    assert {"EXPIRES", "PID", "LIMITS", "TENANT", "PARENT"} <= set(head.split())
    assert len(rows) == len(crowd)


def test_a_template_and_json_lines_have_a_line_each(forkd: Forkd, crowd: list[str]) -> None:
    lines = forkd("ls", "-o", r"{id}\t{snapshot_tag} {parent_id}").out.splitlines()
    assert {each.split("\t")[0] for each in lines} == set(crowd)
    assert {each.split("\t")[1] for each in lines} == {"warm -", f"{LONG_TAG} -"}

    assert len(forkd("ls", "-o", "jsonl").out.splitlines()) == MANY
    assert forkd("ls", "-o", "json").out == forkd("ls", "--json").out
    assert forkd("inspect", crowd[0], "-o", "{memory_limit_mib}").out == "512\n"
    assert "memory 512 MiB" in forkd("inspect", crowd[0]).out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-o", "yaml"], "--output: 'yaml' is not a format; write wide, json, jsonl or a template"),
        (["-o", "{nothing}"], "--output: there is no field 'nothing'; there are: id, "),
        (["-o", "{{.ID}}"], "--output: there is no field '.ID'; there are: id, "),
        (["-o", "wide", "--json"], "--json and --output exclude each other"),
        (["-o", "{id}" * 2_000], "a template has at most 4096 characters"),
    ],
)
@pytest.mark.usefixtures("crowd")
def test_a_format_that_is_none_is_one_error(forkd: Forkd, args: list[str], said: str) -> None:
    ended = forkd("ls", *args)

    assert (ended.code, ended.out) == (2, "")
    assert said in (json_error(ended) if "--json" in args else ended.err)


def json_error(ended: Ended) -> str:
    return ended.err.replace("\\", "")


def test_ids_that_begin_alike_are_shown_longer() -> None:
    alike = [f"sb-{'a' * 20}b", f"sb-{'a' * 20}c"]

    assert [*short_ids(alike).values()] == alike
    assert short_ids([f"sb-{'a' * 26}"]) == {f"sb-{'a' * 26}": "sb-aaaaaaaaa"}
    assert short_ids([]) == {}


def test_characters_that_take_two_places_are_counted_so() -> None:
    columns = [Column[str]("A", str), Column[str]("B", str)]

    assert drawn(columns, [["日本", "x"], ["abcd", "y"]], 80)[1:] == ["日本  x", "abcd  y"]


def test_a_column_with_further_lines_keeps_its_place() -> None:
    columns = [Column[str]("A", str), Column[str]("B", str, wrap=True)]

    lines = drawn(columns, [["x", "one two " * 10]], 40)

    assert len(lines) > 3
    assert max(map(len, lines)) <= 40
    assert all(line.startswith("   ") for line in lines[2:])


def test_what_a_daemon_says_cannot_act_on_a_terminal(
    daemon: RunningDaemon, shown: Callable[..., list[str]], crowd: list[str]
) -> None:
    guest = daemon.service.running[SandboxId(crowd[0])]
    guest.sandbox = replace(guest.sandbox, exit_reason="\x1b[2J\nout")

    assert any("?[2J?out" in line for line in shown(120, "ls"))


def test_a_template_says_which_fields_there_are() -> None:
    assert filled("{a.b} {c}", {"a": {"b": 1}, "c": "x"}) == "1 x"
    assert filled("{a.c}", {"a": {"b": 1}}) == "-"
    with pytest.raises(InvalidRequest, match="no field 'd'; there are: a, c"):
        filled("{d}", {"a": 1, "c": 2})
