"""The daemon listens where it is told to, opens that to those who may, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING

import httpx
import pytest

from forkd.daemon.app import create_app
from forkd.daemon.server import listening, told_to_stop
from forkd.daemon.settings import Bind, Settings
from forkd.errors import Conflict
from tests.support.fake_service import FakeService
from tests.support.no_records import no_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from fastapi import FastAPI


@pytest.fixture
def app() -> FastAPI:
    return create_app(FakeService())


async def get(path: str, sock: Path) -> httpx.Response:
    transport = httpx.AsyncHTTPTransport(uds=str(sock), verify=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://forkd") as client:
        return await client.get(path)


async def test_a_socket_has_its_mode_and_is_gone_at_the_end(app: FastAPI, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "forkd.sock"

    async with listening(app, Settings(socket=path, socket_mode=0o600), no_tokens()) as urls:
        assert urls == [f"unix://{path}"]
        assert path.stat().st_mode & 0o777 == 0o600
        assert (await get("/healthz", path)).status_code == 200

    assert not path.exists()


async def test_a_socket_that_a_dead_daemon_left_is_replaced(app: FastAPI, tmp_path: Path) -> None:
    path = tmp_path / "forkd.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    async with listening(app, Settings(socket=path), no_tokens()):
        assert (await get("/healthz", path)).status_code == 200


async def test_a_socket_that_answers_is_left_alone(app: FastAPI, tmp_path: Path) -> None:
    settings = Settings(socket=tmp_path / "forkd.sock")

    async with listening(app, settings, no_tokens()):
        with pytest.raises(Conflict, match="another daemon"):
            async with listening(app, settings, no_tokens()):
                pass
        assert (await get("/healthz", tmp_path / "forkd.sock")).status_code == 200


async def test_an_address_in_use_is_an_error_that_names_it(app: FastAPI, tmp_path: Path) -> None:
    path = tmp_path / "forkd.sock"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings(socket=path, bind=Bind("127.0.0.1", port), state_dir=tmp_path)

        with pytest.raises(Conflict, match=f"cannot listen on 127.0.0.1:{port}, .*") as refused:
            async with listening(app, settings, no_tokens()):
                pass

    assert f"in use by process {os.getpid()} (" in str(refused.value)
    assert str(refused.value).endswith("or set FORKD_BIND to another port")
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_tells_it_to_stop(number: signal.Signals) -> None:
    with told_to_stop() as told:
        os.kill(os.getpid(), number)

        async with asyncio.timeout(5):
            await told.wait()
