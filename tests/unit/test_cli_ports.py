"""`forkd port` and `forkd run -p`: real HTTP through a port of this host to a program.

The fake guests connect to ports of this host, where these tests listen.
"""

from __future__ import annotations

import http.client
import http.server
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
import typer

from forkd.cli.ports import Mapping, mapping
from forkd.limits import FORWARDS_MAX
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]

DEADLINE_S = 10.0

PAGE = b"a page of the program\n" * 5_000


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[int]:
    """The port of a web server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def sandbox(daemon: RunningDaemon, forkd: Forkd) -> str:
    daemon.service.stored = some_snapshots("warm")
    return forkd("fork", "warm").out.strip()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port: int = unused.getsockname()[1]
    return port


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def page(port: int) -> bytes:
    """Return what a web server says, as soon as there is one."""
    until_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
            connection.request("GET", "/")
            return connection.getresponse().read()
        except ConnectionRefusedError:
            assert time.monotonic() < until_s, "it never listens"
            time.sleep(0.01)


class Meanwhile:
    """Does something beside a command that runs in the main thread."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._error: BaseException | None = None

        def work() -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 - raised in the main thread
                self._error = error
                os.kill(os.getpid(), signal.SIGINT)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def done(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def test_a_port_is_forwarded_until_ctrl_c(forkd: Forkd, sandbox: str, web: int) -> None:
    first, second = free_port(), free_port()

    def look() -> None:
        pages.extend((page(first), page(second), page(first)))
        os.kill(os.getpid(), signal.SIGINT)

    pages: list[bytes] = []
    meanwhile = Meanwhile(look)
    ended = forkd("port", sandbox[:10], f"{first}:{web}", f"127.0.0.1:{second}:{web}")
    meanwhile.done()

    assert pages == [PAGE] * 3
    assert (ended.code, ended.err) == (130, "")
    assert ended.out == f"127.0.0.1:{first} -> {web}\n127.0.0.1:{second} -> {web}\n"
    assert not is_open(first)
    assert not is_open(second)


def test_forwarding_ends_with_the_sandbox(
    forkd: Forkd, sandbox: str, web: int, daemon: RunningDaemon
) -> None:
    port = free_port()

    def end() -> None:
        assert page(port) == PAGE
        from forkd import Client  # noqa: PLC0415 - the rest of this file does without

        with Client(daemon.url) as client:
            client.sandboxes.get(sandbox).kill()

    meanwhile = Meanwhile(end)
    ended = forkd("port", "--json", sandbox, f"{port}:{web}")
    meanwhile.done()

    where = {"host": "127.0.0.1", "host_port": port, "guest_port": web}
    assert (ended.code, ended.document) == (0, [where])
    assert ended.err.startswith(f"{sandbox} has ended: ")
    assert not is_open(port)


def test_a_run_forwards_ports_as_long_as_its_command_runs(
    forkd: Forkd, web: int, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.service.stored = some_snapshots("warm")
    port, (reader, writer) = free_port(), os.pipe()

    def look() -> None:
        pages.append(page(port))
        os.write(writer, b"seen")
        os.close(writer)

    pages: list[bytes] = []
    meanwhile = Meanwhile(look)
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        ended = forkd("run", "-p", f"{port}:{web}", "warm", "cat", keep_stdin=True)
    meanwhile.done()

    assert (ended.code, ended.out, pages) == (0, "seen", [PAGE])
    assert ended.err == f"forwarding 127.0.0.1:{port} -> {web}\n"
    assert not is_open(port)
    assert forkd("ls", "-q").out == ""


def test_a_port_that_is_taken_is_refused_before_anything_is_forked(
    forkd: Forkd, daemon: RunningDaemon
) -> None:
    daemon.service.stored = some_snapshots("warm")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = free_port()
        ended = forkd("run", "-p", f"{other}:80", "-p", f"{port}:80", "warm", "echo")
    assert (ended.code, ended.out) == (125, "")
    us = f"process {os.getpid()} ("
    assert f"port {port} of 127.0.0.1 is in use by {us}" in ended.err
    assert " on this host: name another port, or 0 for a free one" in ended.err
    assert not daemon.service.running
    assert not is_open(other)


def test_a_program_that_does_not_listen_yet_is_said_once(
    forkd: Forkd, sandbox: str, web: int
) -> None:
    port, closed = free_port(), free_port()

    def look() -> None:
        assert page(port) == PAGE
        for _ in range(3):
            client = socket.create_connection(("127.0.0.1", hopeless), timeout=DEADLINE_S)
            with client, pytest.raises(ConnectionResetError):
                client.recv(1)
        os.kill(os.getpid(), signal.SIGINT)

    hopeless = free_port()
    meanwhile = Meanwhile(look)
    ended = forkd("port", sandbox, f"{port}:{web}", f"{hopeless}:{closed}")
    meanwhile.done()

    assert ended.code == 130
    assert ended.err.count(f"nothing listens on port {closed} ") == 1


@pytest.mark.parametrize(
    ("text", "host", "host_port", "guest_port"),
    [
        ("8080:80", "127.0.0.1", 8080, 80),
        ("8000", "127.0.0.1", 8000, 8000),
        ("0:80", "127.0.0.1", 0, 80),
        (":80", "127.0.0.1", 0, 80),
        ("192.0.2.1:8080:80", "192.0.2.1", 8080, 80),
        ("127.0.0.1::80", "127.0.0.1", 0, 80),
        ("[::1]:8080:80", "::1", 8080, 80),
        ("65535:65535", "127.0.0.1", 65535, 65535),
    ],
)
def test_a_mapping_is_an_address_and_two_ports(
    text: str, host: str, host_port: int, guest_port: int
) -> None:
    assert mapping(text) == Mapping(host, host_port, guest_port)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a port mapping; write HOST:GUEST: 8080:80"),
        ("http", "is not a port mapping"),
        ("8080:", "is not a port mapping"),
        ("80/udp", "is not a port mapping"),
        ("::1:8080:80", "is not a port mapping"),
        ("1:2:3:4", "is not a port mapping"),
        ("-1:80", "is not a port mapping"),
        ("0", "has 0, which is no port: ports are 1 to 65535"),
        ("8080:0", "has 0, which is no port: ports are 1 to 65535"),
        ("65536:80", "has 65536, which is no port: ports are 0 to 65535"),
        ("8080:" + "9" * 5_000, "ports are 1 to 65535"),
    ],
)
def test_what_is_no_mapping_is_refused(text: str, words: str) -> None:
    with pytest.raises(typer.BadParameter, match=words):
        mapping(text)


def test_a_mapping_is_refused_by_the_name_of_its_option(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("port", sandbox, "http")
    assert ended.code == 2
    assert ended.err.startswith("error: HOST:GUEST: 'http' is not a port mapping; write HOST:GUEST")
    ended = forkd("run", "-p", "8080:0", "warm", "true")
    assert ended.code == 2
    assert "error: --publish: '8080:0' has 0, which is no port" in ended.err


def test_one_port_more_than_a_command_forwards_is_refused(forkd: Forkd, sandbox: str) -> None:
    ended = forkd("port", sandbox, *["0:80"] * (FORWARDS_MAX + 1))
    assert ended.code == 2
    assert "65 ports are more than one command forwards: 64" in ended.err
