"""What is asked about a daemon, and how long sandboxes live."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

import forkd as package
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]


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


def test_waiting_ends_when_all_have_ended(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str
) -> None:
    other = forkd("fork", "warm").out.strip()
    guests = dict(daemon.service.running)

    def end() -> None:
        for guest in guests.values():
            daemon.loop.call_soon_threadsafe(guest.ended.set)
        daemon.loop.call_soon_threadsafe(daemon.service.running.clear)

    timer = threading.Timer(0.2, end)
    timer.start()
    ended = forkd("wait", sandbox, other[:12])

    timer.join()
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
