"""A web server in a real guest, through `forkd port`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from forkd import Client
from tests.support.real_daemon import daemon_of
from tests.support.real_host import REAL, TAG

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

FILE_MIB = 16


@contextlib.contextmanager
def forkd(url: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command line within the block."""
    command = subprocess.Popen(  # noqa: S603 - our own
        [sys.executable, "-m", "forkd", *args],
        env={**os.environ, "FORKD_URL": url},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield command
    finally:
        command.kill()
        command.communicate()


def fetched(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()


def port_in(line: str) -> int:
    """Return the port of `… 127.0.0.1:PORT -> …`."""
    return int(line.partition(" -> ")[0].rpartition(":")[2])


def serve_a_file(url: str) -> None:
    make = f"mkdir /srv/www && head -c {FILE_MIB}M /dev/urandom >/srv/www/file"
    with Client(url) as client, client.sandbox(TAG) as sandbox:
        sandbox.run(make, check=True)
        digest = sandbox.run("sha256sum </srv/www/file", check=True).stdout.split()[0]
        with forkd(url, "port", sandbox.id, "0:8080") as command:
            assert command.stdout is not None
            port = port_in(command.stdout.readline())
            with pytest.raises(ConnectionResetError):
                fetched(port, "/file")  # nobody serves it yet
            serve = ["python3", "-u", "-m", "http.server", "-b", "::1", "8080"]
            with sandbox.exec_stream(serve, cwd="/srv/www") as server:
                next(server)
                data = fetched(port, "/file")
            assert hashlib.sha256(data).hexdigest() == digest
            sandbox.kill()
            assert command.wait(60) == 0


@pytest.mark.soak(only=True)
async def test_a_file_comes_whole_from_a_server_that_listens_for_ipv6(real_host: RealHost) -> None:
    async with daemon_of(real_host) as url:
        await asyncio.to_thread(serve_a_file, url)
