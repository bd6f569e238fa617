"""An error about a port that is taken names the process that has it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from forkd.listeners import in_use

US = f"in use by process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"


@pytest.mark.parametrize(
    ("listens", "asked"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0"),  # noqa: S104 - asked for, not listened on
        ("0.0.0.0", "127.0.0.2"),  # noqa: S104 - nobody connects
        ("127.0.0.1", "localhost"),
        ("::1", "::1"),
        ("::", "127.0.0.1"),
    ],
)
def test_the_process_that_listens_is_named(listens: str, asked: str) -> None:
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    with socket.create_server((listens, 0), family=family) as taken:
        assert in_use(asked, taken.getsockname()[1]) == US


def test_a_listener_that_is_in_nobodys_way_is_not_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert in_use("127.0.0.2", taken.getsockname()[1]) == "in use"


def test_a_socket_that_does_not_listen_is_not_named() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert in_use("127.0.0.1", bound.getsockname()[1]) == "in use"
