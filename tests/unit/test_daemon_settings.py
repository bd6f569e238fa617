"""Settings are read, checked against each other, and refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkd.daemon.auth import TOKEN_CHARS_MIN, new_token, read_token
from forkd.daemon.settings import Bind, Settings, from_environment
from forkd.errors import InvalidRequest


def test_nothing_set_serves_one_socket() -> None:
    settings = from_environment({})

    assert settings.socket == Path("/run/forkd/forkd.sock")
    assert (settings.socket_mode, settings.bind) == (0o660, None)


def test_everything_can_be_set() -> None:
    settings = from_environment(
        {
            "FORKD_SOCKET": "",
            "FORKD_SOCKET_MODE": "600",
            "FORKD_BIND": "[::1]:8889",
            "FORKD_TOKEN_FILE": "/token",
            "FORKD_STATE_DIR": "/s",
            "FORKD_RUN_DIR": "/r",
            "FORKD_CACHE_DIR": "/c",
            "FORKD_VMM": "/v",
            "FORKD_AGENT": "/a",
            "FORKD_TREE_LIVE": "7",
            "FORKD_TREE_DEPTH": "3",
            "FORKD_TREE_PRIVATE_MIB": "64",
        }
    )

    assert settings == Settings(
        socket=None,
        socket_mode=0o600,
        bind=Bind("::1", 8889),
        token_file=Path("/token"),
        state_dir=Path("/s"),
        run_dir=Path("/r"),
        cache_dir=Path("/c"),
        vmm=Path("/v"),
        agent=Path("/a"),
        tree_live=7,
        tree_depth=3,
        tree_private_mib=64,
    )


@pytest.mark.parametrize(
    ("environ", "field"),
    [
        ({"FORKD_SOCKET": ""}, "socket"),
        ({"FORKD_SOCKET": "/" + "x" * 107}, "socket"),
        ({"FORKD_SOCKET_MODE": "rw"}, "FORKD_SOCKET_MODE"),
        ({"FORKD_SOCKET_MODE": "1000"}, "FORKD_SOCKET_MODE"),
        ({"FORKD_BIND": "8889"}, "FORKD_BIND"),
        ({"FORKD_BIND": "127.0.0.1:65536"}, "FORKD_BIND"),
        ({"FORKD_STATE_DIR": ""}, "FORKD_STATE_DIR"),
        ({"FORKD_TREE_LIVE": "0"}, "FORKD_TREE_LIVE"),
        ({"FORKD_TREE_DEPTH": "-1"}, "FORKD_TREE_DEPTH"),
        ({"FORKD_TREE_PRIVATE_MIB": "1.5"}, "FORKD_TREE_PRIVATE_MIB"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(environ: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_environment(environ)

    assert caught.value.context["field"] == field


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.com"])  # noqa: S104 - refused
def test_an_address_that_others_reach_wants_a_token(host: str) -> None:
    with pytest.raises(InvalidRequest, match="without a token"):
        Settings(bind=Bind(host, 8889))
    assert Settings(bind=Bind(host, 8889), token_file=Path("/token")).bind is not None


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
