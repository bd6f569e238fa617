"""A service manager that waits is told, at either kind of address; no other is."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
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
