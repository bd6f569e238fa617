"""`forkd run` leaves nothing behind, and options are ours until the program begins."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from forkd.cli import guests, run
from forkd.errors import TransportError
from forkd.sdk import Sandbox
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]


DEADLINE_S = 10.0


@pytest.fixture(autouse=True)
def snapshots(daemon: RunningDaemon) -> None:
    daemon.service.stored = some_snapshots("warm")


def when_fed(daemon: RunningDaemon, act: Callable[[], object]) -> threading.Thread:
    """Do something once the program has had input."""

    def wait_and_act() -> None:
        daemon.wait_for(lambda: daemon.service.exec_fed)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "args",
    [
        ["warm", "--", "exit", "7"],
        ["warm", "exit", "7"],
        ["-n", "warm", "exit", "7"],
        ["warm", "-n", "exit", "7"],
        ["warm", "-n", "-e", "A=1", "--memory", "64m", "--", "exit", "7"],
        ["warm", "-ne", "A=1", "exit", "7"],
        ["--rm", "warm", "exit", "7"],
    ],
)
def test_a_run_exits_as_its_command_and_leaves_no_sandbox(
    forkd: Forkd, daemon: RunningDaemon, args: list[str]
) -> None:
    ended = forkd("run", *args)

    assert (ended.code, ended.out, ended.err) == (7, "", "")
    assert daemon.service.execs[-1].request.args == ("exit", "7")
    assert forkd("ls", "-q").out == ""


def test_streams_are_attached(forkd: Forkd) -> None:
    assert forkd("run", "warm", "cat", stdin=b"to and fro").out == "to and fro"
    ended = forkd("run", "warm", "fail")
    assert (ended.code, ended.out) == (0, "out")
    assert ended.err.startswith("err ")


def test_options_after_the_program_are_the_programs(forkd: Forkd) -> None:
    assert forkd("run", "warm", "echo", "-it", "--keep", "--", "-e").out == "-it --keep -- -e\n"
    assert forkd("run", "-n", "warm", "--", "echo", "--", "x").out == "-- x\n"


def test_options_may_follow_the_sandbox_of_an_exec(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("exec", sandbox, "-ine", "A=1", "--user", "root", "env")

    assert json.loads(ended.out) == {"A": "1"}
    assert forkd("exec", sandbox, "--nonsense", "env").code == 2
    assert forkd("exec", sandbox, "echo", "-i").out == "-i\n"
    assert forkd("exec", sandbox, "-e").code == 2


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["warm", "nope"], 127),
        (["warm", "text"], 126),
        (["--timeout", "10ms", "warm", "late"], 124),
        (["gone", "true"], 125),
        (["warm"], 125),
        (["--json", "-t", "warm", "true"], 125),
        (["-e", "=1", "warm", "true"], 125),
        (["--ttl", "never", "warm", "true"], 2),
    ],
)
def test_what_fails_leaves_no_sandbox_either(forkd: Forkd, args: list[str], code: int) -> None:
    ended = forkd("run", *args)

    assert ended.code == code
    assert ended.err.startswith(("error: ", "timed out after 10 ms", '{"error": "--json and --tty'))
    assert forkd("ls", "-q").out == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_the_programs_and_the_sandbox_is_removed(
    forkd: Forkd, daemon: RunningDaemon, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    sender = when_fed(daemon, lambda: signal.raise_signal(number))

    ended = forkd("run", "warm", "sleep", stdin=b"go")

    sender.join()
    assert ended.code == 128 + number
    assert signal.getsignal(number) is before
    assert forkd("ls", "-q").out == ""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_that_no_program_has_removes_the_sandbox_too(
    forkd: Forkd, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(guests.How, "run", lambda *_: signal.raise_signal(number))

    ended = forkd("run", "warm", "true")

    assert ended.code == code
    assert signal.getsignal(number) is before
    assert forkd("ls", "-q").out == ""


def test_a_sandbox_whose_removal_fails_ends_by_itself(
    forkd: Forkd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: Sandbox) -> bool:
        raise TransportError("the daemon is away")

    monkeypatch.setattr(Sandbox, "kill", away)
    ended = forkd("run", "warm", "exit", "3")
    (left,) = forkd("ls", "--json").document

    assert ended.code == 3
    assert (
        f"{left['id']} was not removed: the daemon is away; its time to live ends it" in ended.err
    )
    assert left["expires_at_unix"] is not None


def test_a_sandbox_that_is_kept_lives_on(forkd: Forkd) -> None:
    ended = forkd("run", "--keep", "warm", "true")
    limited = forkd("run", "--keep", "--ttl", "1h", "warm", "true")

    id_ = ended.err.removeprefix("kept ").strip()
    found = {each["id"]: each["expires_at_unix"] for each in forkd("ls", "--json").document}
    assert (ended.code, len(id_)) == (0, len("sb-") + 26)
    assert found[id_] is None
    assert found[limited.err.removeprefix("kept ").strip()] is not None


def test_a_run_that_is_longer_than_the_time_to_live_moves_its_end(
    forkd: Forkd, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = threading.Event()
    changed: list[object] = []

    def set_ttl(_: Sandbox, ttl_s: object) -> None:
        changed.append(ttl_s)
        if len(changed) > 1:
            renewed.set()
        raise TransportError("tried again")

    monkeypatch.setattr(run, "RENEWALS", 30_000)
    monkeypatch.setattr(Sandbox, "set_ttl", set_ttl)
    reader, writer = os.pipe()

    def close() -> None:
        renewed.wait(DEADLINE_S)
        os.close(writer)

    closer = threading.Thread(target=close)
    closer.start()
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        ended = forkd("run", "warm", "cat", keep_stdin=True)

    closer.join()
    assert ended.code == 0
    assert set(changed) == {"default"}
    assert daemon.service.running == {}
    count = len(changed)
    assert forkd("run", "--ttl", "1h", "warm", "true").code == 0
    assert len(changed) <= count + 1  # a limit that was asked for is not moved


@pytest.fixture
def sandbox(forkd: Forkd) -> str:
    return forkd("fork", "warm").out.strip()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    far, near = os.openpty()
    with os.fdopen(near, "r+b", buffering=0) as file:
        monkeypatch.setattr(sys, "stdin", file)
        yield far
        os.close(far)


def test_a_shell_is_a_login_shell_in_this_terminal(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str, terminal: int
) -> None:
    os.write(terminal, b"x")

    ended = forkd("shell", "-u", "root", sandbox, keep_stdin=True)

    assert ended.code == 0, ended.err
    request = daemon.service.execs[-1].request
    assert request.args[0] == "/bin/sh"
    assert request.user == "root"
    assert request.tty is not None
    without = forkd("shell", sandbox)
    assert (without.code, "forkd shell needs a terminal" in without.err) == (125, True)


@pytest.mark.parametrize(
    "args",
    [
        ["--image", "python:3.12-slim", "exit", "7"],
        ["--image=python:3.12-slim", "-n", "--", "exit", "7"],
        ["-ne", "A=1", "--image", "python:3.12-slim", "--", "exit", "7"],
    ],
)
def test_an_image_is_run_from_a_snapshot_that_is_baked_of_it(
    forkd: Forkd, daemon: RunningDaemon, args: list[str]
) -> None:
    ended = forkd("run", "--memory", "1g", "--pull", "always", *args)

    (asked,) = daemon.service.image_snapshots.asked
    assert ended.code == 7, ended.err
    assert str(asked.image) == "docker.io/library/python:3.12-slim"
    assert asked.changes.memory_mib == 1_024
    assert forkd("ls", "-q").out == ""
    assert daemon.service.execs[-1].request.args == ("exit", "7")


def test_options_of_the_program_of_an_image_are_its_own(forkd: Forkd) -> None:
    assert forkd("run", "-n", "--image", "python", "echo", "-it", "-n").out.endswith("-it -n\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "name a snapshot: forkd run TAG, or forkd run --image IMAGE"),
        (["--image", "python"], "give a command"),
        (["--image", "nothing", "true"], "no image docker.io/library/nothing"),
        (["--image", "python", "--memory", "1", "true"], "--memory: 1 MiB is out of range"),
    ],
)
def test_an_image_that_cannot_be_run_is_one_error(forkd: Forkd, args: list[str], said: str) -> None:
    ended = forkd("run", *args)

    assert (ended.code, ended.out) == (125, "")
    assert said in ended.err
    assert forkd("ls", "-q").out == ""


def test_the_result_of_a_run_is_a_document(forkd: Forkd) -> None:
    assert forkd("run", "--json", "warm", "fail").document["stdout"] == "out"
