"""Keys are files, closed to others, and a name means one key."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from forkd.errors import Conflict, InvalidRequest, NotFound
from forkd.packs import keys
from forkd.packs.keys import Keyring, default_folder, parse_public, show
from forkd.packs.limits import TRUSTED_KEYS_MAX


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path)


def test_a_new_key_signs_and_is_trusted(ring: Keyring) -> None:
    made = ring.new("mine")

    signature = keys.sign(ring.secret("mine"), b"message")

    assert keys.verifies(made.public, signature, b"message")
    assert not keys.verifies(made.public, signature, b"massage")
    assert ring.trusted() == [made.public]
    assert (made.own, made.trusted) == (True, True)


def test_a_secret_is_for_its_owner_only(ring: Keyring, tmp_path: Path) -> None:
    ring.new("mine")

    path = tmp_path / "keys/mine"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(InvalidRequest, match="others may read"):
        ring.secret("mine")


def test_a_public_key_is_read_as_it_is_shown(ring: Keyring) -> None:
    made = ring.new("mine")

    assert parse_public(f" {show(made.public)}\n") == made.public


@pytest.mark.parametrize(
    "text",
    [
        "",
        "forkd-ed25519",
        "forkd-ed25519 AAAA",
        "forkd-ed25519 " + "A" * 42 + "!=",
        "ssh-ed25519 " + "A" * 43 + "=",
        "forkd-secret-ed25519 " + "A" * 43 + "=",
    ],
)
def test_what_is_no_public_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="public key"):
        parse_public(text)


def test_a_strangers_key_is_trusted_until_it_is_removed(ring: Keyring) -> None:
    public = keys.public_of(bytes(32))

    ring.trust("alice@work", public)

    assert ring.name_of(public) == "alice@work"
    assert not ring.get("alice@work").own
    ring.remove("alice@work")
    assert ring.trusted() == []
    assert ring.list_all() == []


def test_a_name_means_one_key(ring: Keyring) -> None:
    public = keys.public_of(bytes(32))
    ring.trust("alice", public)
    ring.trust("alice", public)

    with pytest.raises(Conflict, match="another key"):
        ring.trust("alice", keys.public_of(bytes(range(32))))
    with pytest.raises(Conflict, match="already"):
        ring.new("alice")


def test_a_key_that_was_removed_signs_no_more(ring: Keyring) -> None:
    ring.new("mine")
    ring.remove("mine")

    with pytest.raises(NotFound, match="forkd key new mine"):
        ring.secret("mine")
    with pytest.raises(NotFound):
        ring.remove("mine")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-o", "a\n", "x" * 65])
def test_a_name_that_could_be_a_path_is_none(name: str, ring: Keyring) -> None:
    for call in (ring.new, ring.get, ring.secret, ring.remove):
        with pytest.raises(InvalidRequest, match="name"):
            call(name)


def test_one_key_more_than_may_be_trusted_is_refused(ring: Keyring) -> None:
    for number in range(TRUSTED_KEYS_MAX):
        ring.trust(f"k{number}", keys.public_of(number.to_bytes(32)))

    with pytest.raises(Conflict, match=str(TRUSTED_KEYS_MAX)):
        ring.trust("more", keys.public_of(bytes(range(32))))


def test_a_damaged_key_is_said_to_be(ring: Keyring, tmp_path: Path) -> None:
    ring.new("mine")
    (tmp_path / "keys/mine").write_text("x" * 5000)

    with pytest.raises(InvalidRequest, match="keys/mine"):
        ring.secret("mine")


def test_keys_are_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/config")
    monkeypatch.delenv("FORKD_KEYS", raising=False)
    assert default_folder() == Path("/config/forkd")

    monkeypatch.setenv("FORKD_KEYS", "/keys")
    assert default_folder() == Path("/keys")
