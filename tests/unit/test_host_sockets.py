"""A service manager that waits is told, and no other; connections that are passed on."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
from forkd.host import sockets
from forkd.host.sockets import NOTIFY_VARIABLE, notify_manager

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("abstract", [False, True])
def test_a_manager_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, abstract: bool
) -> None:
    path = str(tmp_path / "notify")
    monkeypatch.setenv(NOTIFY_VARIABLE, f"@{path}" if abstract else path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{path}" if abstract else path)

        notify_manager("READY=1")

        assert manager.recv(100, socket.MSG_DONTWAIT) == b"READY=1"


def test_without_a_manager_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NOTIFY_VARIABLE, raising=False)

    notify_manager("READY=1")


def test_a_manager_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(NOTIFY_VARIABLE, str(tmp_path / "nobody"))

    with pytest.raises(HostError, match="service manager"):
        notify_manager("READY=1")


def test_bytes_that_are_passed_on_wait_for_no_others() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as accepted,
    ):
        sockets.pass_on_at_once(accepted)
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert client.fileno() > 0


async def test_what_is_looked_at_stays_to_be_read() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(0)
        other.send(b"abc")
        assert await sockets.peek(one, 1, 16) == b"abc"
        assert await sockets.peek(one, 3, 2) == b"ab"
        other.close()
        assert await sockets.peek(one, 4, 16) == b"abc", "no more will come"
        assert one.recv(16) == b"abc"


def test_a_connection_that_was_led_nowhere_has_no_other_destination() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert sockets.original_destination(accepted) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_is_sent_over_a_connection_of_tcp_goes_out_as_it_comes(host: str) -> None:
    with (
        sockets.bind_tcp(host, 0, 1) as listener,
        socket.create_connection(listener.getsockname()[:2]),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
