"""Tables in a real pseudo-terminal: they fit it, and no cell is cut."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from forkd import Client
from forkd.cli.tables import Column, drawn, filled, folded, short_ids
from forkd.errors import InvalidRequest
from forkd.model.ids import SandboxId, SandboxName, Tag
from forkd.model.network import NetworkPolicy, RefusedDestination, RefusedName
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import SnapshotStatus
from tests.support.fake_service import a_snapshot, some_snapshots

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
    ("host", "show"),
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


LONGEST = "abcdefgh." * 7 + "i"
"""A tag, or a name of anything but a sandbox, that is as long as it may be."""

LONG_HOST = f"{'a' * 63}.{'b' * 63}.example.com"

NEEDED = {
    ("ls",): ("ID", "NAME", "SNAPSHOT", "STATUS", "ENDED BY"),
    ("snapshot", "ls"): ("TAG", "STATUS", "STORED", "PARENT"),
    ("snapshot", "info", LONGEST): ("Tag:", "Ancestors:"),
    ("snapshot", "gc"): ("KIND", "NAME", "SIZE"),
    ("token", "ls"): ("NAME", "TENANT", "SCOPES", "EXPIRES"),
    ("tenant", "ls"): ("TENANT", "SANDBOXES", "MEMORY", "SNAPSHOTS"),
    ("secret", "ls"): ("NAME", "HOSTS", "ENV", "PLACEHOLDER"),
    ("image", "ls"): ("IMAGE", "NAME", "SIZE", "REFERENCE"),
    ("context", "ls"): ("NAME", "CURRENT", "URL"),
    ("key", "ls"): ("NAME", "SIGNS", "TRUSTED", "KEY"),
    ("top", "--once"): ("ID", "SNAPSHOT", "CPU %", "MEMORY", "DISK"),
    ("audit", "--file", "audit.log"): ("TIME", "PRINCIPAL", "ACTION", "RESULT", "OBJECTS"),
    ("network", LONGEST[:63]): ("REFUSED", "PORT", "TIMES", "WHY"),
    ("inspect", LONGEST[:63]): ("Id:", "Name:", "Snapshot:"),
    ("tree",): ("sb-",),
}
"""What each table has in a terminal of 80 columns, however long its values are."""


@pytest.fixture
def longest(daemon: RunningDaemon, forkd: Forkd, shown: object, tmp_path: Path) -> None:
    """One thing of each kind, whose names and values are as long as they may be."""
    assert shown is not None  # it says where contexts and keys are
    service = daemon.service
    broken = a_snapshot(f"{LONGEST[:-1]}-", status=SnapshotStatus.FAILED)
    child = replace(a_snapshot(LONGEST), parent=Tag(f"{LONGEST[:-1]}j"))
    service.stored = {each.tag: each for each in (child, broken, a_snapshot("warm"))}
    options = ForkOptions(name=SandboxName(LONGEST[:63]), network=NetworkPolicy(internet=True))
    for each in (ForkOptions(), options):
        made = service.fork_one(Tag(LONGEST), each)
        guest = service.running[made.id]
        guest.sandbox = replace(guest.sandbox, exit_reason="its agent was killed " * 4)
    service.networks.names = (RefusedName(LONG_HOST, "no rule names it", 12_345_678),)
    service.networks.destinations = (RefusedDestination("2001:db8::" + "f" * 4, "tcp", 443, 9),)
    for key, image in service.image_cache.images.items():
        reference = f"registry.example.com:5000/{'team/' * 40}image:tag"
        service.image_cache.images[key] = replace(image, name=LONGEST, reference=reference)
    with Client(daemon.url) as client:
        client.tokens.create(LONGEST, ["read", "run", "snapshots", "metrics", "admin"])
        client.secrets.set(LONGEST, "a-secret-value", [LONG_HOST], env="E" * 64)
        client.tenants.set_quotas(LONGEST, sandboxes=20_000, memory_mib=2_000_000)
    assert forkd("key", "new", LONGEST).code == 0
    assert forkd("context", "add", LONGEST[:63], f"https://{LONG_HOST}:8889").code == 0
    line = {"time": "2026-11-23T10:00:00.000000Z", "action": "create_snapshot", "result": "ok"}
    line |= {"principal": f"token:{LONGEST}", "tenant": LONGEST, "remote": f"[{'f' * 39}]:65535"}
    (tmp_path / "audit.log").write_text(
        json.dumps({**line, "objects": [LONGEST, *service.running]})
    )


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", NEEDED, ids=lambda command: " ".join(command[:2])[:16])
@pytest.mark.usefixtures("longest")
def test_a_table_keeps_the_columns_that_people_need_however_long_its_values_are(
    shown: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    columns: int,
) -> None:
    monkeypatch.chdir(tmp_path)

    lines = shown(columns, *command)

    text = "\n".join(lines)
    assert max(map(len, lines)) <= columns
    assert "…" not in text
    assert all(each in text for each in NEEDED[command])


@pytest.mark.usefixtures("longest")
def test_a_diff_has_whole_paths_and_no_lines_of_its_own(
    shown: Callable[..., list[str]], daemon: RunningDaemon
) -> None:
    path = "/".join(["", *["a" * 250] * 3])
    first = next(iter(daemon.service.running.values()))
    first.contents.files[path] = b"new"

    assert shown(80, "diff", LONGEST, first.sandbox.id) == [f"+ {path}"]


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
    narrow = shown(64, "ls")[0]
    assert narrow.split() == ["ID", "SNAPSHOT", "STATUS", "AGE", "ENDED", "BY"]
    tiny = shown(5, "ls")
    assert tiny[0] == "ID"
    assert max(map(len, tiny)) == 5
    assert {each[:12] for each in crowd} == {
        "".join(tiny[place : place + 3]) for place in range(1, len(tiny), 3)
    }


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


def test_a_cell_with_further_lines_keeps_its_column() -> None:
    columns = [Column[str]("A", str), Column[str]("B", str), Column[str]("C", str)]

    lines = drawn(columns, [["x", "one two " * 10, "end"]], 40)

    assert len(lines) > 3
    assert max(map(len, lines)) <= 40
    assert lines[1].endswith("  end")
    assert all(line.startswith("   ") for line in lines[2:])


def test_a_long_word_is_broken_after_a_mark_if_one_is_near() -> None:
    assert folded("token:continuous-integration-of-a-team", 16) == [
        "token:",
        "continuous-",
        "integration-of-",
        "a-team",
    ]
    assert folded(f"see {'x' * 20}", 8) == ["see", "x" * 8, "x" * 8, "x" * 4]
    assert folded("日本語", 4) == ["日本", "語"]


ANY = (
    Column[str]("ID", str, short=True),
    Column[str]("NAME", str),
    Column[str]("SIZE", str, right=True, minor=True),
    Column[str]("WHY", str),
    Column[str]("FROM", str, minor=True),
)


@pytest.mark.parametrize("width", [*range(2, 100, 7), 120, 200])
@pytest.mark.parametrize("name", ["x", "x" * 64, "a-name-in-many-parts" * 10, "two words " * 20])
def test_no_table_is_wider_than_asked_for_and_none_loses_a_character(name: str, width: int) -> None:
    row = ["sb-aaaaaaaaa", name, "1.5 GiB", f"because of {name}", "elsewhere"]

    lines = drawn(ANY, [row], width)

    kept = [place for place, each in enumerate(ANY) if each.title[:2] in "".join(lines)]
    texts = [text for place in kept for text in (ANY[place].title, row[place])]
    assert max(map(len, lines)) <= width
    assert kept[0] == 0
    assert counted("".join(lines)) == counted("".join(texts))


def counted(text: str) -> Counter[str]:
    return Counter(text.replace(" ", ""))


def test_columns_that_people_need_are_left_out_last() -> None:
    row = ["sb-aaaaaaaaa", "x" * 64, "1.5 GiB", "y" * 64, "elsewhere"]

    def titles(width: int) -> list[str]:
        return drawn(ANY, [row], width)[0].split()

    assert titles(97) == ["ID", "NAME", "SIZE", "WHY", "FROM"]
    assert titles(91) == ["ID", "NAME", "SIZE", "WHY"]
    assert titles(80) == ["ID", "NAME", "WHY"]
    assert titles(40) == ["ID", "NAME", "WHY"]
    assert titles(39) == ["ID", "NAME"]
    assert titles(25) == ["ID"]


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
