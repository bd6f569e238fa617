"""`forkd audit` finds who did what, in a file that may be long, cut off, rotated or growing."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from forkd.cli.audit import LINES_SHOWN
from forkd.cli.audit_log import AuditFile, Wanted, default_path, parse_time
from forkd.cli.main import app
from forkd.errors import InvalidRequest
from forkd.telemetry.audit import AuditLog, Entry, Result

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from pathlib import Path

SANDBOXES = 1_000
MAIN = "from forkd.cli.main import main; main()"


def line(at: str, action: str = "fork", **more: Any) -> str:  # noqa: ANN401 - JSON
    members = {"principal": "token:ci", "tenant": "red", "result": "ok", "objects": []}
    return json.dumps({"time": at, "action": action, **members, **more})


def written(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(f"{each}\n" for each in lines))
    return path


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


def forkd(capfd: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app(["audit", *map(str, args)], prog_name="forkd")
    out, err = capfd.readouterr()
    return int(ended.value.code or 0), out, err


LINES = (
    line("2026-11-23T10:00:00.000000Z", "fork", objects=["warm", "sb-aaaa"]),
    line("2026-11-23T11:00:00.000000Z", "exec", objects=["sb-aaaa"], result="failed"),
    line("2026-11-23T12:00:00.000000Z", "exec", objects=["sb-bbbb"], tenant="blue"),
    line("2026-11-23T13:00:00.000000Z", "kill", objects=["sb-bbbb"], principal="user:root"),
)

FILTERS = [
    ([], [0, 1, 2, 3]),
    (["--since", "2026-11-23T11:00"], [1, 2, 3]),
    (["--since", "2026-11-23T13:00+02:00"], [1, 2, 3]),
    (["--until", "2026-11-23T11:00:00Z"], [0]),
    (["--since", "2026-11-24"], []),
    (["--principal", "user:root"], [3]),
    (["--tenant", "blue"], [2]),
    (["--action", "fork", "--action", "kill"], [0, 3]),
    (["--object", "sb-aaaa"], [0, 1]),
    (["--object", "sb-a"], [0, 1]),
    (["--object", "war"], []),
    (["--result", "failed"], [1]),
    (["--object", "sb-aaaa", "--action", "exec"], [1]),
]


@pytest.mark.parametrize(("filters", "found"), FILTERS, ids=lambda each: " ".join(map(str, each)))
def test_it_shows_the_lines_that_are_wanted_as_they_are(
    path: Path, capfd: pytest.CaptureFixture[str], filters: list[str], found: list[int]
) -> None:
    written(path, LINES)

    code, out, err = forkd(capfd, "--file", path, "--json", *filters)

    assert (code, err) == (0, "")
    assert [json.loads(each) for each in out.splitlines()] == [json.loads(LINES[n]) for n in found]


@pytest.mark.parametrize("text", ["yesterday", "", "5", "-5m", "9" * 20 + "d"])
def test_a_time_that_is_none_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--since must be a time, such as"):
        parse_time(text, "since")


def test_lines_that_are_cut_off_are_passed_over_and_counted(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path.write_text(f"{LINES[0]}\n{LINES[1][:20]}\n[]\n{LINES[2]}\n{LINES[3][:-3]}")

    code, out, err = forkd(capfd, "--file", path, "--json")

    assert (code, len(out.splitlines())) == (0, 2)
    assert "3 lines were cut off" in err


def test_rotated_files_are_read_first_compressed_ones_too(path: Path) -> None:
    with gzip.open(f"{path}.2.gz", "wb") as file:
        file.write(f"{LINES[0]}\n".encode())
    written(path.with_name("audit.log.1"), LINES[1:2])
    written(path, LINES[2:])
    for seconds, name in enumerate(("audit.log.2.gz", "audit.log.1"), 1):
        os.utime(path.with_name(name), (seconds, seconds))

    found = list(AuditFile(path).read(Wanted()))
    assert [each["time"][11:13] for each in found] == ["10", "11", "12", "13"]
    found = list(AuditFile(path).read(Wanted(since=parse_time("2026-11-23", "since"))))
    assert [each["time"][11:13] for each in found] == ["12", "13"]  # the others ended in 1970


def test_what_is_followed_goes_on_after_a_rotation_and_waits_for_the_end_of_a_line(
    path: Path,
) -> None:
    written(path, LINES[:1])
    lines = cast("Generator[dict[str, Any]]", AuditFile(path).read(Wanted(), follow=True))
    assert next(lines)["action"] == "fork"

    append(path, LINES[1][:30])
    finish = threading.Timer(0.1, append, (path, f"{LINES[1][30:]}\n"))
    finish.start()
    assert next(lines)["result"] == "failed"
    finish.join()
    path.rename(path.with_suffix(".1"))
    written(path, LINES[3:])
    assert next(lines)["action"] == "kill"
    lines.close()


def test_a_file_that_is_missing_is_named_with_the_way_out(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = forkd(capfd, "--file", path)

    assert (code, out) == (3, "")
    assert str(path) in err
    assert "--file" in err


def test_the_file_is_where_the_daemon_writes_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("FORKD_AUDIT_LOG", "FORKD_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORKD_HOME", str(tmp_path / "home"))
    assert str(default_path()) == "/var/lib/forkd/audit.log"
    (tmp_path / "home/store").mkdir(parents=True)
    (tmp_path / "home/store/audit.log").touch()
    assert default_path() == tmp_path / "home/store/audit.log"
    monkeypatch.setenv("FORKD_STATE_DIR", str(tmp_path))
    assert default_path() == path
    monkeypatch.setenv("FORKD_AUDIT_LOG", "/l")
    assert str(default_path()) == "/l"


def test_no_more_is_held_than_is_shown_however_long_the_log_is(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    written(path, (line(f"2026-11-23T10:00:00.{each:06}Z", str(each)) for each in range(20_000)))
    code, out, err = forkd(capfd, "--file", path, "--limit", 10)

    assert code == 0
    header, *rows = out.splitlines()
    assert header.split()[:2] == ["TIME", "PRINCIPAL"]
    assert len(rows) == 10
    assert "19999" in rows[-1]
    assert "19990 older lines are not shown" in err


def test_nothing_of_a_line_reaches_the_terminal_as_a_command_of_its_own(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    written(path, [line("2026-11-23T10:00:00.000000Z", "\x1b[31m[bold]", remote="[::1]:5")])
    _, out, _ = forkd(capfd, "--file", path)

    assert "?[31m[bold]" in out
    assert "[::1]:5" in out


def of_a_thousand_sandboxes(path: Path) -> list[str]:
    """Write what the daemon writes of forks, execs and kills; return the ids."""
    ids = [f"sb-{number:026}" for number in range(SANDBOXES)]
    with contextlib.closing(AuditLog(path)) as log:
        log.note(Entry("fork", Result.OK, "r", "token:ci", "red", "10.0.0.7:5", ("warm", *ids)))
        for action in ("exec", "delete_sandbox"):
            for each in ids:
                log.note(Entry(action, Result.OK, "r", "token:ci", "red", "10.0.0.7:5", (each,)))
    return ids


def in_a_terminal(*args: object, until: str = "\0", columns: int = 250) -> tuple[int, str]:
    """Run `forkd audit` in a pseudo-terminal; return its status and what it showed.

    It is interrupted as soon as its output has ended with `until`.
    """
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", MAIN, "audit", *map(str, args)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    with subprocess.Popen(  # noqa: S603 - our own
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # it has ended
            while piece := os.read(ours, 65_536):
                shown += piece
                if shown.endswith(f"{until}\r\n".encode()):
                    process.send_signal(signal.SIGINT)
    os.close(ours)
    return process.returncode, shown.decode()


@pytest.mark.timeout(120)
def test_in_a_terminal_with_the_log_of_a_thousand_sandboxes(path: Path) -> None:
    ids = of_a_thousand_sandboxes(path)

    code, shown = in_a_terminal("--file", path, "--object", ids[500])
    rows = shown.splitlines()
    assert code == 0
    assert [each in row for each, row in zip(("fork", "exec", "delete"), rows[1:], strict=True)]
    assert f"warm {ids[0]} {ids[1]} and 998 more" in rows[1]
    assert ids[500] in rows[3]

    code, shown = in_a_terminal("--file", path)
    assert (code, shown.count("\n")) == (0, 1 + LINES_SHOWN + 1)
    assert "1001 older lines are not shown" in shown

    code, shown = in_a_terminal("--file", path, "--json", "--action", "delete_sandbox")
    assert code == 0
    assert [json.loads(each)["objects"] for each in shown.splitlines()] == [[each] for each in ids]

    code, shown = in_a_terminal(
        "--file", path, "--follow", "--action", "delete_sandbox", until=ids[-1]
    )
    assert (code, shown.count("delete_sandbox")) == (130, SANDBOXES)


@pytest.mark.parametrize(("columns", "time"), [(80, "10:00"), (130, "10:00:00.000")])
def test_in_a_narrow_terminal_objects_have_lines_of_their_own_and_nothing_is_cut(
    path: Path, columns: int, time: str
) -> None:
    ids = [f"sb-{number:026}" for number in range(3)]
    written(path, [line("2026-11-23T10:00:00.000000Z", "create_snapshot", objects=ids)])

    code, shown = in_a_terminal("--file", path, columns=columns)

    words = shown.split()
    assert code == 0
    assert all(
        len(each) <= columns for each in shown.splitlines()[1:]
    )  # the first has its bold type
    assert {*ids, "create_snapshot", "token:ci", time} <= {*words}
