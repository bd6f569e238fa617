"""Connections that nobody opened are opened once, and closed with what they belong to."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from forkd.sdk import _defaults
from forkd.sdk._async.http import AsyncHttp
from forkd.sdk._endpoint import Endpoint
from forkd.sdk._sync.http import Http
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from tests.support.daemon import RunningDaemon

ONE, OTHER = Endpoint("http://127.0.0.1:1"), Endpoint("http://127.0.0.1:2")


class Opened:
    """What can be closed in both flavours."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.closed = False

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[Endpoint, Opened]:
    opened: dict[Endpoint, Opened] = {}
    monkeypatch.setattr(_defaults, "_opened", opened)
    return opened


def test_there_is_one_for_each_daemon_however_many_threads_want_it() -> None:
    found: list[Opened] = []
    threads = [
        threading.Thread(target=lambda: found.append(_defaults.sync_default(Opened, ONE)))
        for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert len({id(each) for each in found}) == 1
    assert _defaults.sync_default(Opened, OTHER) is not found[0]
    _defaults.close_all()
    assert found[0].closed


def test_an_event_loop_has_its_own_and_closes_them_when_it_ends() -> None:
    async def twice() -> Opened:
        one = await _defaults.async_default(Opened, ONE)
        assert await _defaults.async_default(Opened, ONE) is one
        assert await _defaults.async_default(Opened, OTHER) is not one
        assert not one.closed
        return one

    first, second = asyncio.run(twice()), asyncio.run(twice())

    assert first is not second
    assert (first.closed, second.closed) == (True, True)


def test_a_forked_process_starts_without_any(opened: dict[Endpoint, Opened]) -> None:
    _defaults.sync_default(Opened, ONE)
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writes, str(len(opened)).encode())
        os._exit(0)
    os.waitpid(child, 0)

    assert os.read(reads, 10) == b"0"
    assert len(opened) == 1
    os.close(reads)
    os.close(writes)


async def test_the_default_daemon_is_the_one_that_the_environment_names_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORKD_URL", ONE.url)
    one, other = Http.default(), await AsyncHttp.default()
    monkeypatch.setenv("FORKD_URL", OTHER.url)

    assert (one.endpoint.url, other.endpoint.url) == (ONE.url, ONE.url)
    assert Http.default().endpoint.url == OTHER.url
    monkeypatch.setenv("FORKD_URL", ONE.url)
    assert Http.default() is one


PROGRAM = """
import asyncio
from forkd import AsyncSandbox, Sandbox
with Sandbox("warm") as sandbox:
    print(sandbox.eval("6 * 7"))
async def main():
    async with AsyncSandbox("warm") as sandbox:
        print(await sandbox.eval("6 * 7"))
asyncio.run(main())
asyncio.run(main())
"""


def test_a_program_that_opens_no_client_ends_without_a_warning(daemon: RunningDaemon) -> None:
    daemon.service.stored = some_snapshots("warm")

    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env={**os.environ, "FORKD_URL": daemon.url},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert (done.stdout, done.stderr) == ("42\n42\n42\n", "")
    assert daemon.service.running == {}
