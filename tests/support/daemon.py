"""A daemon over a `FakeService`, on a real Unix socket, in a thread of its own.

`daemon` gives its URL and its service; both flavours of the SDK, and the CLI, can talk to it.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from forkd.daemon.app import create_app
from forkd.daemon.clients import TCP
from forkd.daemon.server import listening
from forkd.daemon.settings import Bind, Settings
from tests.support.fake_service import FakeService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastapi import FastAPI

START_TIMEOUT_S = 10.0

AT_ONCE = replace(TCP, login_delay_s=0.0)
"""Limits of clients whose failed log-ins are answered at once."""

TOKEN = "a-token-for-tests-only"  # noqa: S105 - it guards nothing


@dataclass
class RunningDaemon:
    """A daemon that serves.

    Attributes:
        url: Its Unix socket.
        tcp_url: Its TCP address, which wants `TOKEN`.
        service: What it serves, new for each test.
        loop: Its event loop, which runs in another thread.
    """

    url: str
    tcp_url: str
    app: FastAPI
    loop: asyncio.AbstractEventLoop
    service: FakeService = field(default_factory=FakeService)

    def wait_for(self, event: Callable[[], asyncio.Event]) -> None:
        """Return once an event of the service is set."""

        async def wait() -> None:
            await asyncio.wait_for(event().wait(), START_TIMEOUT_S)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(START_TIMEOUT_S)


@pytest.fixture
def daemon(
    running_daemon: RunningDaemon, caplog: pytest.LogCaptureFixture
) -> Iterator[RunningDaemon]:
    """A daemon whose service has seen nothing yet; a request that crashed fails the test."""
    running_daemon.service = running_daemon.app.state.host = FakeService()
    yield running_daemon
    said = [each.getMessage() for each in caplog.get_records("call")]
    crashes = [each for each in said if each.startswith("request crashed")]
    assert len(crashes) <= running_daemon.service.crashes_expected


@pytest.fixture(scope="session")
def running_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One daemon for all tests, because stopping one takes a while."""
    folder = tmp_path_factory.mktemp("daemon")
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(TOKEN)
    settings = Settings(
        socket=folder / "forkd.sock", bind=Bind("127.0.0.1", 0), token_file=folder / "token"
    )
    started: list[RunningDaemon] = []
    ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        service = FakeService()
        app = create_app(service)
        async with listening(app, settings, service.tokens, tcp=AT_ONCE) as (url, tcp_url):
            started.append(RunningDaemon(url, tcp_url, app, asyncio.get_running_loop()))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    assert ready.wait(START_TIMEOUT_S)
    yield started[0]
    started[0].loop.call_soon_threadsafe(stop.set)
    thread.join(START_TIMEOUT_S)
    assert not thread.is_alive()
