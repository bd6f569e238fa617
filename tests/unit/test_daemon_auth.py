"""A token guards the TCP address, whatever the address is, and nobody but its owner can read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.daemon.auth import TOKEN_CHARS_MIN, ServedNames, new_token, obtain_token, read_token
from forkd.daemon.settings import Bind, Settings
from forkd.errors import Forbidden, InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import Scope


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "its-token"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_is_read_without_the_white_space_around_it(tmp_path: Path) -> None:
    token = new_token()

    assert read_token(token_file(tmp_path, f"\n{token} \n")) == token


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x" * (TOKEN_CHARS_MIN - 1),
        "two words are not one",
        "ü" * 20,
        "REPLACE_ME_WITH_A_TOKEN",
        "change-me-change-me-change-me",
        "CHANGEME000000000000",
        "REPLACE_THIS_TOKEN_PLEASE",
    ],
)
def test_a_token_that_guards_nothing_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequest, match="its-token"):
        read_token(token_file(tmp_path, text))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_token_file_that_others_may_open_is_refused_with_the_way_out(
    tmp_path: Path, mode: int
) -> None:
    path = token_file(tmp_path, new_token(), mode)

    with pytest.raises(InvalidRequest, match=f"chmod 600 {path}"):
        read_token(path)


def test_a_token_file_that_is_missing_is_named(tmp_path: Path) -> None:
    settings = Settings(bind=Bind("127.0.0.1", 0), token_file=tmp_path / "nothing")

    with pytest.raises(InvalidRequest, match="nothing does not exist"):
        obtain_token(settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])  # noqa: S104 - nothing listens
def test_without_a_token_file_the_daemon_makes_a_token_and_keeps_it(
    tmp_path: Path, host: str
) -> None:
    settings = Settings(bind=Bind(host, 0), state_dir=tmp_path)

    made = obtain_token(settings)

    assert len(made) > 2 * TOKEN_CHARS_MIN
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert obtain_token(settings) == made


def test_a_token_of_its_own_that_others_may_read_is_refused_too(tmp_path: Path) -> None:
    settings = Settings(bind=Bind("127.0.0.1", 0), state_dir=tmp_path)
    obtain_token(settings)
    (tmp_path / "token").chmod(0o644)

    with pytest.raises(InvalidRequest, match="chmod 600"):
        obtain_token(settings)


def asked(host: str, origin: str | None = None, *, reached: str = "127.0.0.1") -> Scope:
    headers = [(b"host", host.encode())]
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    return {"type": "http", "headers": headers, "server": (reached, 8889)}


SERVED = ServedNames("10.0.0.5", ["forkd.example", "fd00::1"])


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8889", "LOCALHOST", "127.0.0.1:8889", "127.9.9.9", "[::1]:8889",
        "10.0.0.5:8889", "forkd.example", "Forkd.Example:443", "[FD00::1]:8889",
    ],
)  # fmt: skip
def test_names_that_it_was_told_to_serve_are_served(host: str) -> None:
    SERVED.check(asked(host))
    SERVED.check(asked(host, origin=f"https://{host}"))


@pytest.mark.parametrize(
    "host",
    [
        "", "evil.example", "localhost.evil.example", "10.0.0.6", "forkd.example.evil.example",
        "evil.example:8889@localhost", "127.0.0.1.nip.example", "[::1", "2130706433",
    ],
)  # fmt: skip
def test_other_names_are_not_whatever_they_resolve_to(host: str) -> None:
    with pytest.raises(Forbidden) as caught:
        SERVED.check(asked(host))
    assert caught.value.context == {"header": "host"}
    with pytest.raises(Forbidden):
        SERVED.check(asked("localhost", origin=f"http://{host}"))


@pytest.mark.parametrize("origin", ["null", "", "file://", "http://", "chrome-extension://abc"])
def test_a_page_without_a_name_that_is_served_is_refused(origin: str) -> None:
    with pytest.raises(Forbidden) as caught:
        SERVED.check(asked("localhost", origin=origin))

    assert caught.value.context == {"header": "origin"}


def test_bound_to_every_address_it_is_served_under_the_one_that_was_reached() -> None:
    names = ServedNames("0.0.0.0", [])  # noqa: S104 - nothing listens

    names.check(asked("10.0.0.7:8889", reached="10.0.0.7"))
    with pytest.raises(Forbidden):
        names.check(asked("10.0.0.8:8889", reached="10.0.0.7"))
