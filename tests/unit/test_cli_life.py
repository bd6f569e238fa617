"""What is asked about a daemon, and how long sandboxes live."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

import forkd as package
from forkd.errors import InvalidRequest
from forkd.limits import LABELS_MAX
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]

WAITS_S = 30.0
"""How long a command may take until it waits."""


@pytest.fixture
def sandbox(daemon: RunningDaemon, forkd: Forkd) -> str:
    daemon.service.stored = some_snapshots("warm")
    return forkd("fork", "warm").out.strip()


def test_a_ping_asks_the_daemon_or_a_sandbox(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str
) -> None:
    assert f"at {daemon.url} answers (" in forkd("ping").out
    assert forkd("ping", sandbox[:10]).out.startswith(f"{sandbox} answers (")
    assert forkd("ping", sandbox, "--json").document["pong"] is True
    assert forkd("--url", "http://127.0.0.1:1", "ping").code == 7
    assert forkd("ping", "sb-nothing").code in {2, 3}


def test_versions_are_those_of_the_command_and_the_daemon(
    forkd: Forkd, daemon: RunningDaemon
) -> None:
    assert forkd("version", "--json").document == {
        "client": package.__version__,
        "daemon": package.__version__,
        "url": daemon.url,
    }
    away = forkd("--url", "http://127.0.0.1:1", "version")
    assert away.code == 7
    assert away.out.startswith(f"Client:  {package.__version__}\n")
    assert "no daemon answers" in away.err


def test_help_is_that_of_the_command(forkd: Forkd) -> None:
    assert forkd("help", "snapshot", "create").out == forkd("snapshot", "create", "--help").out
    assert forkd("help").out == forkd("--help").out
    unknown = forkd("help", "snapshot", "nothing")
    assert (unknown.code, "no command 'forkd snapshot nothing'" in unknown.err) == (2, True)


def test_sandboxes_have_names_and_labels_and_are_found_by_them(forkd: Forkd, sandbox: str) -> None:
    named = forkd(
        "fork", "warm", "--name", "db", "-l", "team=search", "--label", "tier="
    ).out.strip()

    assert forkd("ls", "-q", "--name", "db").out.strip() == named
    assert forkd("ls", "-q", "--label", "team").out.strip() == named
    assert forkd("ls", "-q", "-l", "team=search", "-l", "tier=").out.strip() == named
    assert forkd("ls", "-q", "--label", "team=other").out == ""
    assert len(forkd("ls", "-q", "--status", "running").out.splitlines()) == 2
    assert forkd("ls").out.split()[:3] == ["ID", "NAME", "SNAPSHOT"]
    assert "team=search" in forkd("ls", "-o", "wide").out
    assert forkd("ls", "-o", "{labels.team}").out.splitlines() == ["-", "search"]
    assert "team=search, tier=" in forkd("inspect", "db").out.replace("tier=,", "tier=")
    assert forkd("exec", "db", "echo", "hi").out == "hi\n"
    assert forkd("branch", "db", "--label", "try=1").code == 0
    assert len(forkd("ls", "-q", "-l", "try").out.splitlines()) == 1

    assert forkd("rename", "db", "store").out == "store\n"
    assert forkd("rename", "store", "").out == f"{named}\n"
    assert forkd("kill", "store").code == 1
    assert "NAME" not in forkd("ls").out
    assert sandbox in forkd("ls").out


def test_labels_are_set_and_removed_one_by_one(forkd: Forkd, sandbox: str) -> None:
    assert forkd("label", sandbox).out == ""
    assert forkd("label", sandbox, "team=search", "tier=").out == "team=search\ntier=\n"
    assert forkd("label", sandbox, "tier-", "a/b-c=1=2").out == "team=search\na/b-c=1=2\n"
    assert forkd("label", sandbox, "never-there-").out == "team=search\na/b-c=1=2\n"
    assert forkd("label", sandbox).out == "team=search\na/b-c=1=2\n"
    assert forkd("label", sandbox, "--json").document["labels"] == {
        "team": "search",
        "a/b-c": "1=2",
    }


def test_the_sdk_changes_labels_and_one_too_many_changes_nothing(
    daemon: RunningDaemon, sandbox: str
) -> None:
    with package.Client(daemon.url) as client:
        found = client.sandboxes.get(sandbox)
        found.set_labels({f"k{number}": "v" for number in range(LABELS_MAX)})

        with pytest.raises(InvalidRequest, match=f"has {LABELS_MAX + 1} labels"):
            found.change_labels({"more": "x"})
        with pytest.raises(InvalidRequest, match="nothing to change"):
            found.change_labels({})
        with pytest.raises(InvalidRequest, match=f"at most {LABELS_MAX}"):
            found.change_labels({f"x{number}": None for number in range(LABELS_MAX + 1)})
        assert len(found.refresh().labels) == LABELS_MAX
        swapped = found.change_labels({"more": "x", "k0": None})
        assert "k0" not in swapped.labels
        assert len(swapped.labels) == LABELS_MAX


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["label", "db", "x"], 2, "'x' is neither KEY=VALUE nor KEY-"),
        (["label", "db", "-"], 2, "'-' is neither KEY=VALUE nor KEY-"),
        (["label", "db", "=x"], 2, "'=x' is neither KEY=VALUE nor KEY-"),
        (["label", "db", "a=1", "a-"], 2, "the label 'a' is there twice"),
        (["label", "db", "b d=1"], 2, "the key of a label is"),
        (["label", "db", "x=" + "y" * 65_536], 2, "the value of x has 65536"),
        (["label", "nobody", "a=1"], 3, "nobody"),
        (["fork", "warm", "--name", "db"], 4, "db"),
        (["fork", "warm", "--name", "x", "-n", "2"], 2, "--name is for one sandbox, not for 2"),
        (["fork", "warm", "--name", "A b"], 2, "--name: 'A b' is not 1 to 63 lower-case letters"),
        (["fork", "warm", "--name", "x" * 64], 2, "is not 1 to 63 lower-case letters"),
        (["run", "--name", "-", "warm", "true"], 125, "--name: '-' is not 1 to 63"),
        (["rename", "db", "A b"], 2, "NAME: 'A b' is not 1 to 63 lower-case letters"),
        (["fork", "warm", "-l", "x"], 2, "--label: 'x' is not of the form KEY=VALUE"),
        (["fork", "warm", "-l", "=x"], 2, "--label: '=x' is not of the form KEY=VALUE"),
        (["fork", "warm", "-l", "x" * 65_536], 2, "and 65456 characters more is not of the form"),
        (["fork", "warm", "-l", "x=" + "y" * 65_536], 2, "--label: the value of x has 65536"),
        (["fork", "warm", "-l", "b d=1"], 2, "--label: the key of a label is"),
        (["fork", "warm", "-e", "A"], 2, "--env: 'A' is not of the form"),
        (["ls", "-l", "b d"], 2, "--label: the key of a label is"),
        (["ttl", "db", "-5m"], 2, "-5… is below zero, which no value may be"),
        (["ttl", "db", "5 parsecs"], 2, "DURATION: '5 parsecs' is not a duration"),
        (["ttl", "db", "--", "-5m"], 2, "DURATION: '-5m' is not in the future"),
        (["ttl", "db", "400d"], 2, "DURATION: 400d is out of range; it must be at most 365d"),
    ],
)
def test_what_no_sandbox_can_have_is_one_error(
    forkd: Forkd, sandbox: str, args: list[str], code: int, said: str
) -> None:
    forkd("rename", sandbox, "db")
    before = forkd("ls", "--json").document

    ended = forkd(*args)

    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err
    assert len(ended.err) < 1_000
    assert forkd("ls", "--json").document == before


def test_the_end_of_a_sandbox_is_shown_and_moved(forkd: Forkd, sandbox: str) -> None:
    def ends(*args: str) -> int | None:
        found: int | None = forkd("ttl", sandbox, *args, "--json").document["expires_at_unix"]
        return found

    assert forkd("ttl", sandbox).out == "never\n"
    hour, default = ends("1h"), ends("default")
    assert hour is not None
    assert default is not None
    assert hour > default
    assert " (in " in forkd("ttl", sandbox, "1h").out
    assert ends("never") is None
    forked = forkd("fork", "warm", "--ttl", "default", "--json").document[0]
    assert forked["expires_at_unix"] - forked["created_at_unix"] == 300


def test_a_sandbox_is_ended_when_nobody_uses_it(forkd: Forkd, sandbox: str) -> None:
    assert forkd("ttl", sandbox, "--idle", "10m").out == "after 10m without use\n"
    assert forkd("ttl", sandbox, "--json").document["idle_ttl_secs"] == 600
    both = forkd("ttl", sandbox, "1h").out
    assert both.endswith(", or after 10m without use\n")
    assert forkd("ttl", sandbox, "never", "--idle", "never").out == "never\n"
    forked = forkd("fork", "warm", "--idle-ttl", "90s", "--json").document[0]
    assert forked["idle_ttl_secs"] == 90
    for typed, said in (
        ("5 parsecs", "--idle: '5 parsecs' is not a duration"),
        ("400d", "--idle: 400d is out of range; it must be at most 365d"),
    ):
        refused = forkd("ttl", sandbox, "--idle", typed)
        assert (refused.code, refused.out) == (2, "")
        assert said in refused.err
    refused = forkd("fork", "warm", "--idle-ttl", "400d")
    assert (refused.code, "--idle-ttl: 400d is out of range" in refused.err) == (2, True)


def test_a_sandbox_is_paused_and_goes_on(forkd: Forkd, sandbox: str) -> None:
    other = forkd("fork", "warm").out.strip()

    assert forkd("pause", sandbox, other[:12]).out.splitlines() == [sandbox, other]
    assert forkd("ls", "-q", "--status", "paused").out.splitlines() == [sandbox, other]
    refused = forkd("exec", sandbox, "true")
    assert (refused.code, "resume" in refused.err) == (125, True)
    assert forkd("resume", sandbox, "--json").document[0]["status"] == "running"
    assert forkd("unpause", other).code == 0
    assert forkd("exec", other, "true").code == 0
    assert forkd("pause", "sb-aaaaaaaaaaaaaaaaaaaaaaaaaa", sandbox).code == 3
    assert forkd("ls", "-q", "--status", "paused").out == ""


def test_waiting_ends_when_all_have_ended(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str
) -> None:
    other = forkd("fork", "warm").out.strip()
    guests = dict(daemon.service.running)

    def end() -> None:
        for guest in guests.values():
            guest.followed.wait(WAITS_S)
        for guest in guests.values():
            daemon.loop.call_soon_threadsafe(guest.ended.set)
        daemon.loop.call_soon_threadsafe(daemon.service.running.clear)

    ending = threading.Thread(target=end)
    ending.start()
    ended = forkd("wait", sandbox, other[:12])

    ending.join()
    assert (ended.code, set(ended.out.splitlines())) == (
        0,
        {f"{sandbox} deleted", f"{other} deleted"},
    )


def test_waiting_has_a_time_limit(forkd: Forkd, daemon: RunningDaemon, sandbox: str) -> None:
    ended = forkd("wait", "--timeout", "50ms", sandbox)

    assert (ended.code, ended.out, ended.err) == (124, "", "timed out after 50 ms\n")
    assert forkd("wait", "--timeout", "50ms", sandbox, "--json").document == []

    for guest in daemon.service.running.values():  # ends what is still read of its log
        daemon.loop.call_soon_threadsafe(guest.ended.set)


def test_waiting_for_what_is_not_there_is_an_error(forkd: Forkd) -> None:
    assert forkd("wait", "sb-aaaaaaaaaaaaaaaaaaaaaaaaaa").code == 3
