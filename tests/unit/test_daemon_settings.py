"""Settings are read, checked against each other, and refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from forkd.daemon.auth import TOKEN_CHARS_MIN, new_token, read_token
from forkd.daemon.main import app
from forkd.daemon.settings import (
    Bind,
    Settings,
    default,
    flag,
    meaning,
    misspelt,
    read,
    variable,
)
from forkd.errors import InvalidRequest


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(variable(name), raising=False)


def test_nothing_set_serves_one_socket() -> None:
    settings = read({})

    assert settings.socket == Path("/run/forkd/forkd.sock")
    assert (settings.socket_mode, settings.bind) == (0o660, None)


EVERYTHING = {
    "socket": ("", None),
    "socket_mode": ("600", 0o600),
    "bind": ("[::1]:8889", Bind("::1", 8889)),
    "token_file": ("/token", Path("/token")),
    "state_dir": ("/s", Path("/s")),
    "run_dir": ("/r", Path("/r")),
    "cache_dir": ("/c", Path("/c")),
    "vmm": ("/v", Path("/v")),
    "agent": ("/a", Path("/a")),
    "tree_live": ("7", 7),
    "tree_depth": ("3", 3),
    "tree_private_mib": ("64", 64),
    "pack_keys": ("/k", Path("/k")),
    "pack_unsigned": ("allow", "allow"),
}
"""Each setting, as it is written and as it is read."""


def test_everything_can_be_set_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (text, _) in EVERYTHING.items():
        monkeypatch.setenv(variable(name), text)

    assert read({}).model_dump() == as_read()


def test_everything_can_be_set_by_flags_which_go_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORKD_TREE_LIVE", "8")
    monkeypatch.setenv("FORKD_SOCKET_MODE", "what is not looked at is not refused")

    assert read({name: text for name, (text, _) in EVERYTHING.items()}).model_dump() == as_read()


def as_read() -> dict[str, object]:
    assert set(EVERYTHING) == set(Settings.model_fields)
    return {name: value for name, (_, value) in EVERYTHING.items()} | {
        "bind": {"host": "::1", "port": 8889}
    }


WRONG = [
    ("socket", "/" + "x" * 107, "107 bytes"),
    ("socket_mode", "rw", "octal"),
    ("socket_mode", "1000", "octal"),
    ("bind", "8889", "host:port"),
    ("bind", "127.0.0.1:65536", "host:port"),
    ("state_dir", "", "folder"),
    ("tree_live", "0", "greater than or equal to 1"),
    ("tree_depth", "-1", "greater than or equal to 1"),
    ("tree_private_mib", "1.5", "integer"),
    ("pack_unsigned", "yes", "'allow' or 'refuse'"),
]


@pytest.mark.parametrize(("name", "text", "problem"), WRONG)
def test_a_value_that_makes_no_sense_is_refused_with_its_variable_and_the_default(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, problem: str
) -> None:
    monkeypatch.setenv(variable(name), text)

    with pytest.raises(InvalidRequest) as caught:
        read({})

    assert caught.value.context["field"] == variable(name)
    for part in (variable(name), problem, default(name)):
        assert part in str(caught.value)


@pytest.mark.parametrize(("name", "text", "problem"), WRONG)
def test_a_flag_that_makes_no_sense_is_refused_by_its_name(
    name: str, text: str, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        read({name: text})

    assert caught.value.context["field"] == flag(name)


def test_a_daemon_must_listen_somewhere() -> None:
    with pytest.raises(InvalidRequest, match="socket, or bind"):
        read({"socket": ""})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FORKD_SOKET", ["FORKD_SOCKET"]),
        ("FORKD_STATEDIR", ["FORKD_STATE_DIR"]),
        ("FORKD_CACHE", ["FORKD_CACHE_DIR"]),
        ("FORKD_TREE_LIVES", ["FORKD_TREE_LIVE"]),
        ("FORKD_BIND", []),
        ("FORKD_KEYS", []),
        ("FORKD_TOKEN", []),
        ("FORKD_HOME", []),
        ("FORKD_FOR_SOMETHING_ELSE", []),
        ("SOCKET", []),
    ],
)
def test_a_variable_that_may_be_misspelt_is_told_with_what_may_be_meant(
    name: str, meant: list[str]
) -> None:
    assert [each for _, each in misspelt({name: ""})] == meant


def test_every_flag_has_a_help_and_names_its_default_and_its_variable() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]  # it is a group
    options = {each.name: each for each in command.params}

    for name in Settings.model_fields:
        assert options[name].opts == [flag(name)]
        assert options[name].help == meaning(name) != ""
        assert variable(name) in options[name].show_default
        assert default(name) in options[name].show_default


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.168.1.1", "example.com"])  # noqa: S104 - refused
def test_an_address_that_others_reach_wants_a_token(host: str) -> None:
    with pytest.raises(InvalidRequest, match="without a token"):
        read({"bind": f"{host}:8889"})
    assert read({"bind": f"{host}:8889", "token_file": "/token"}).bind is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_wants_none(host: str) -> None:
    assert Settings(bind=Bind(host, 8889)).token_file is None


def test_a_token_is_read_without_the_white_space_around_it(tmp_path: Path) -> None:
    token = new_token()
    (tmp_path / "token").write_text(f"\n{token} \n")

    assert read_token(tmp_path / "token") == token


@pytest.mark.parametrize(
    "text", ["", "x" * (TOKEN_CHARS_MIN - 1), "two words are not one", "ü" * 20]
)
def test_a_token_that_guards_nothing_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)

    with pytest.raises(InvalidRequest):
        read_token(tmp_path / "token")


def test_a_token_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nothing"):
        read_token(tmp_path / "nothing")
