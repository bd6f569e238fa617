"""Connections over TCP notice that the daemon's host has vanished."""

from __future__ import annotations

import base64
import errno
import hashlib
import socket
import threading
from typing import TYPE_CHECKING

import httpx
import pytest

from forkd.errors import TransportError
from forkd.sdk import _transport
from forkd.sdk._endpoint import Endpoint

if TYPE_CHECKING:
    from pathlib import Path

WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def serve_once(listener: socket.socket) -> threading.Thread:
    """Answer one HTTP request and keep the connection."""

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            client.recv(65536)
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            client.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def accept_and_fall_silent(listener: socket.socket, ended: threading.Event) -> threading.Thread:
    """Take one WebSocket and never say anything again, as a host without power."""

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            head = client.recv(65536)
            key = head.lower().split(b"sec-websocket-key:")[1].split(b"\r\n")[0]
            start = head.lower().index(b"sec-websocket-key:") + len(b"sec-websocket-key:")
            key = head[start : start + len(key)].strip()
            digest = hashlib.sha1(key + WEBSOCKET_GUID, usedforsecurity=False).digest()
            client.sendall(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Accept: " + base64.b64encode(digest)
                + b"\r\n\r\n"
            )  # fmt: skip
            ended.wait(60)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_requests_over_tcp_have_the_kernel_look_after_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = serve_once(listener)
        with _transport.sync_http(Endpoint(url_of(listener))) as client:
            stream = client.get("/").extensions["network_stream"]
            connection: socket.socket = stream.get_extra_info("socket")
            found = [connection.getsockopt(level, name) for level, name, _ in _transport.KEEPALIVE]
        server.join()

    assert found == [value for _, _, value in _transport.KEEPALIVE]


def test_requests_over_a_unix_socket_have_nothing_to_look_after(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        server = serve_once(listener)
        with _transport.sync_http(Endpoint(f"unix://{tmp_path}/s")) as client:
            assert client.get("/").text == "ok"
        server.join()


def test_a_websocket_whose_daemon_has_fallen_silent_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_transport, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(_transport, "PING_TIMEOUT_S", 0.2)
    monkeypatch.setattr(_transport, "CLOSE_TIMEOUT_S", 0.1)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = accept_and_fall_silent(listener, ended)
        opened = _transport.sync_socket(Endpoint(url_of(listener)), "/")
        try:
            with pytest.raises(TransportError, match="broke"):
                opened.receive()
        finally:
            ended.set()
            opened.close()
            server.join()


async def test_an_async_websocket_whose_daemon_has_fallen_silent_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_transport, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(_transport, "PING_TIMEOUT_S", 0.2)
    monkeypatch.setattr(_transport, "CLOSE_TIMEOUT_S", 0.1)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = accept_and_fall_silent(listener, ended)
        opened = await _transport.async_socket(Endpoint(url_of(listener)), "/")
        try:
            with pytest.raises(TransportError, match="broke"):
                await opened.receive()
        finally:
            ended.set()
            await opened.aclose()
            server.join()


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_socket_that_is_closed_to_us_names_the_group_to_join(tmp_path: Path) -> None:
    path = tmp_path / "forkd.sock"
    path.touch()

    with (
        pytest.raises(TransportError, match=rf"{path} is closed .*--groups {path.group()} "),
        _transport.transport_errors(Endpoint(f"unix://{path}")),
    ):
        raise httpx.ConnectError("refused") from PermissionError(errno.EACCES, "denied")
