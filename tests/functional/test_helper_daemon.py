"""`forkd up` and `down` with the helper machine, whatever has died; and its address in a crowd."""

from __future__ import annotations

import asyncio
import collections
import errno
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from forkd import Client, programs
from forkd.daemon.clients import TCP_CONNECTIONS_MAX
from forkd.errors import HostError
from forkd.machine import Machine, lifecycle
from forkd.machine.health import why_unwell
from forkd.machine.kernel import default_cache
from forkd.machine.process import ProcessId
from tests.support import leaks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.soak import Soak

pytestmark = [
    pytest.mark.needs("qemu", "root"), pytest.mark.soak(only=True), pytest.mark.timeout(300),
]  # fmt: skip

DEADLINE_S = 120.0
STATE_MIB = 512

FILLS_MAX = 100
"""How often what is free may have become less before it was taken."""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder on a disk of its own, which a test can fill."""
    folder = tmp_path_factory.mktemp("state")
    options = f"size={STATE_MIB}m,mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "state", folder], check=True)  # noqa: S603, S607 - ours
    yield folder
    subprocess.run(["umount", folder], check=True)  # noqa: S603, S607 - ours


@pytest.fixture(scope="module")
def daemon(state: Path) -> Iterator[lifecycle.RunningDaemon]:
    yield lifecycle.up(state, mode="helper", progress=str)
    assert lifecycle.down(state) is True


async def ask(url: str, request: bytes) -> str:
    """Send one request over a connection of its own; return the status line, or what happened."""
    address = urlsplit(url)
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(request)
        answer = await reader.read()
        return answer.partition(b"\r\n")[0].decode() or "nothing"
    except OSError as error:
        return repr(error)
    finally:
        if writer is not None:
            writer.close()


async def ask_at_once(url: str, request: bytes, count: int) -> collections.Counter[str]:
    async with asyncio.timeout(DEADLINE_S):
        return collections.Counter(await asyncio.gather(*(ask(url, request) for _ in range(count))))


def request(daemon: lifecycle.RunningDaemon, line: str, body: object = None) -> bytes:
    assert daemon.token_file is not None
    data = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Authorization: Bearer {daemon.token_file.read_text()}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def test_no_request_of_a_crowd_is_lost(daemon: lifecycle.RunningDaemon, soak: Soak) -> None:
    """QEMU's own listener loses a third of three hundred.

    A client whose connection is reset cannot know whether it has made a sandbox.  The daemon lets
    an address have a crowd once a valid token came from it.
    """
    listing = request(daemon, "GET /v2/sandboxes")
    for count in (1, soak.count(200, TCP_CONNECTIONS_MAX // 2)):
        served = asyncio.run(ask_at_once(daemon.url, listing, count))
        assert served == {"HTTP/1.1 200 OK": count}

    count = soak.count(60, 120)
    fork = request(daemon, "POST /v2/sandboxes", {"snapshot_tag": "nobody-made-this", "n": 1})
    served = asyncio.run(ask_at_once(daemon.url, fork, count))
    assert served == {"HTTP/1.1 404 Not Found": count}


def test_up_starts_a_daemon_again_that_was_killed_in_the_machine(
    daemon: lifecycle.RunningDaemon, state: Path
) -> None:
    machine = Machine.attach(state / "machine")
    assert machine.run(["pkill", "-KILL", "-f", "[f]orkd.daemon serve"]) == 0
    assert why_unwell(daemon.url) is not None
    said: list[str] = []

    again = lifecycle.up(state, progress=said.append)

    assert why_unwell(again.url) is None
    assert (again.url, again.process) == (daemon.url, daemon.process)
    assert any("starting it again" in each for each in said)


def test_up_opens_a_door_again_that_was_killed(
    daemon: lifecycle.RunningDaemon, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Machine.attach(state / "machine").door
    assert door is not None
    door.end((signal.SIGKILL,), grace_s=30)

    with monkeypatch.context() as patch:
        patch.delenv(leaks.MARK)  # the new door is all tests', not this one's: `daemon` ends it
        assert lifecycle.up(state, progress=str).url == daemon.url
    assert why_unwell(daemon.url) is None


def test_what_the_machine_writes_into_the_cache_stays_in_the_machine(
    daemon: lifecycle.RunningDaemon, state: Path
) -> None:
    """The user boots kernels and images from the cache: the machine must not put one there."""
    assert daemon.mode == "helper"
    machine = Machine.attach(state / "machine")
    cache = default_cache()
    written = cache / "kernels" / "forkd-test-poison"
    kernels = {each.name for each in (cache / "kernels").iterdir()}
    output = bytearray()

    status = machine.run(
        ["sh", "-c", f"ls {cache}/kernels && echo poison >{written} && cat {written}"],
        on_stdout=output.extend,
    )

    assert status == 0
    assert set(output.decode().split()) == kernels | {"poison"}
    assert not written.exists()


def test_the_daemon_in_the_machine_knows_the_recipes_that_come_with_forkd(
    daemon: lifecycle.RunningDaemon,
) -> None:
    """A recipe that is uploaded may name one of them as its base."""
    assert daemon.token_file is not None
    with Client(url=daemon.url, token=daemon.token_file.read_text()) as client:
        listed = client.recipes.list()

    ours = {path.parent.name for path in programs.RECIPES.glob("*/recipe.toml")}
    assert {each.name for each in listed if each.error is None} == ours


def fill(folder: Path, filler: Path) -> None:
    """Take all that is free on the disk of a folder, of which the machine takes some meanwhile."""
    with filler.open("wb") as file:
        for _ in range(FILLS_MAX):
            free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
            try:
                os.posix_fallocate(file.fileno(), 0, free_bytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            else:
                return
    pytest.fail(f"{free_bytes} bytes are still free")


def test_a_full_disk_pauses_the_machine_and_room_continues_it(
    daemon: lifecycle.RunningDaemon, state: Path
) -> None:
    machine = Machine.attach(state / "machine")
    filler = state / "filler"
    fill(state, filler)
    machine.spawn(
        ["sh", "-c", "dd if=/dev/zero of=/var/lib/forkd/big bs=1M count=64 conv=fsync; echo $?"],
        log="/tmp/written",
    )
    reason = until_unwell(daemon.url)
    assert f"the disk with {state / 'machine'} is full" in reason
    with pytest.raises(HostError, match=r"is full\. Free 64 MiB"):
        lifecycle.up(state, progress=str)

    filler.unlink()

    until_well(daemon.url)
    output = bytearray()
    machine.run(
        ["sh", "-c", "until [ -s /tmp/written ]; do :; done; tail -1 /tmp/written"],
        on_stdout=output.extend,
    )
    assert bytes(output) == b"0\n"  # the write that found no room was not lost


def test_a_machine_whose_starter_was_killed_is_found_and_ended(tmp_path: Path) -> None:
    """No exception tells a killed `forkd up` to end the QEMU that it has started."""
    command = [sys.executable, "-m", "forkd.cli", "up", "--mode", "helper"]
    environment = os.environ | {"FORKD_HOME": str(tmp_path)}
    starter = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)  # noqa: S603 - ours
    pid_file = tmp_path / "machine" / "qemu.pid"
    deadline_s = time.monotonic() + DEADLINE_S
    while not (pid_file.exists() and pid_file.read_text()):
        assert starter.poll() is None
        assert time.monotonic() < deadline_s
    starter.kill()
    starter.wait()
    qemu = ProcessId.of(int(pid_file.read_text()))
    assert qemu is not None

    assert lifecycle.down(tmp_path) is True

    assert not qemu.is_alive()
    assert lifecycle.down(tmp_path) is False


def until_unwell(url: str) -> str:
    """Ask until the daemon is unwell; return why."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        reason = why_unwell(url, timeout_s=5)
        if reason is not None and "full" in reason:
            return reason
    raise AssertionError("the machine is not paused")


def until_well(url: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while why_unwell(url, timeout_s=5) is not None:
        assert time.monotonic() < deadline_s
