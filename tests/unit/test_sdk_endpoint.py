"""The SDK finds the daemon where it was told to look, in a documented order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from forkd.errors import InvalidRequest
from forkd.sdk import Endpoint, _endpoint, discover
from forkd.sdk._endpoint import state_dir

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORKD_HOME", str(tmp_path))
    monkeypatch.delenv("FORKD_URL", raising=False)
    monkeypatch.delenv("FORKD_TOKEN", raising=False)
    return tmp_path


def test_what_is_passed_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKD_URL", "http://environment:1")
    monkeypatch.setenv("FORKD_TOKEN", "environment")

    assert discover("http://passed:1", "passed") == Endpoint("http://passed:1", "passed")
    assert discover() == Endpoint("http://environment:1", "environment")


def test_what_forkd_up_wrote_is_found(home: Path) -> None:
    (home / "token").write_text("secret\n")
    said = {"url": "http://127.0.0.1:1", "token_file": str(home / "token")}
    (home / "endpoint.json").write_text(json.dumps(said))

    assert discover() == Endpoint("http://127.0.0.1:1", "secret")


def test_without_anything_it_is_the_daemons_own_socket_if_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(_endpoint.SOCKET_DEFAULT) == "/run/forkd/forkd.sock"
    monkeypatch.setattr(_endpoint, "SOCKET_DEFAULT", tmp_path / "forkd.sock")
    (tmp_path / "forkd.sock").touch()

    assert discover() == Endpoint(f"unix://{tmp_path}/forkd.sock")


def test_without_a_socket_it_is_the_address_that_clients_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_endpoint, "SOCKET_DEFAULT", tmp_path / "forkd.sock")

    assert discover() == Endpoint("http://127.0.0.1:8889")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"url": "http://x", "token_file": "/no"}'])
def test_a_damaged_file_says_who_writes_it_anew(home: Path, text: str) -> None:
    (home / "endpoint.json").write_text(text)

    with pytest.raises(InvalidRequest, match="forkd up"):
        discover()


@pytest.mark.parametrize("url", ["", "x", "ftp://x", "http://", "unix://", "/run/forkd.sock"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        Endpoint(url)


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Endpoint("http://x", "secret"))


@pytest.mark.parametrize(
    ("url", "http", "websocket"),
    [
        ("unix:///a/b", "http://forkd", "ws://forkd"),
        ("http://x:1/", "http://x:1", "ws://x:1"),
        ("https://x", "https://x", "wss://x"),
    ],
)
def test_every_address_has_a_base_for_both_protocols(url: str, http: str, websocket: str) -> None:
    endpoint = Endpoint(url)

    assert (endpoint.http_url, endpoint.websocket_url) == (http, websocket)


def test_the_state_folder_follows_the_xdg_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORKD_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert str(state_dir()) == "/x/forkd"

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert str(state_dir()) == "/home/me/.local/state/forkd"
