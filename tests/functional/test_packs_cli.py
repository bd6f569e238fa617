"""`forkd pack`, `unpack`, `push`, `pull` and `key`, over a daemon and a web server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import Client
from forkd.errors import InvalidRequest, PackError
from forkd.model.ids import Tag
from forkd.packs import keys
from forkd.packs.limits import TRUSTED_KEYS_MAX
from tests.support.fake_service import a_snapshot
from tests.support.packs import PUBLIC, signed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon
    from tests.support.web import Web

    Forkd = Callable[..., Ended]


@pytest.fixture(autouse=True)
def _own_keys_and_one_snapshot(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORKD_KEYS", str(tmp_path / "keyring"))
    monkeypatch.chdir(tmp_path)
    for tag in ("numpy", "numpy-breaks"):
        daemon.service.stored[Tag(tag)] = a_snapshot(tag)


def test_a_pack_is_signed_by_ones_own_key_and_taken_elsewhere(
    forkd: Forkd, daemon: RunningDaemon
) -> None:
    assert forkd("key", "new").code == 0
    packed = forkd("pack", "numpy", "--json").document

    taken = forkd("unpack", "numpy.forkpack", "--as", "copy", "--json").document

    assert packed["bytes"] == Path("numpy.forkpack").stat().st_size
    assert packed["links"] == ["base", "numpy"]
    assert taken["signed_by"] == packed["signed_by"] is not None
    assert taken["snapshot"]["tag"] == "copy"
    assert Tag("copy") in daemon.service.stored


def test_a_pack_without_a_key_says_how_to_make_one(forkd: Forkd) -> None:
    ended = forkd("pack", "numpy")

    assert ended.code == 2
    assert "forkd key new default" in ended.err
    assert "--unsigned" in ended.err
    assert list(Path().glob("*numpy*")) == []


def test_an_unsigned_pack_is_refused_unless_told(forkd: Forkd) -> None:
    assert forkd("pack", "numpy", "--unsigned", "-o", "x.forkpack").code == 0

    refused = forkd("unpack", "x.forkpack", "--as", "copy", "--json")
    taken = forkd("unpack", "x.forkpack", "--as", "copy", "--allow-unsigned", "--json")

    assert refused.code == 1
    assert json.loads(refused.err)["code"] == "pack"
    assert json.loads(refused.err)["context"]["reason"] == "unsigned"
    assert taken.document["signed_by"] is None


def test_a_strangers_pack_is_refused_until_the_key_is_trusted(forkd: Forkd) -> None:
    forkd("pack", "numpy", "--unsigned")
    path = Path("numpy.forkpack")
    path.write_bytes(signed(path.read_bytes()))

    refused = forkd("unpack", "numpy.forkpack", "--as", "copy")
    shown = keys.show(PUBLIC)
    assert refused.code == 1
    assert shown in refused.err
    assert forkd("key", "trust", "alice", *shown.split()).code == 0

    assert forkd("unpack", "numpy.forkpack", "--as", "copy").code == 0
    assert forkd("key", "rm", "alice").code == 0
    assert forkd("unpack", "numpy.forkpack", "--as", "again").code == 1


def test_the_daemon_refuses_too_whatever_the_client_looked_at(
    daemon: RunningDaemon, forkd: Forkd
) -> None:
    forkd("pack", "numpy", "--unsigned")
    data = Path("numpy.forkpack").read_bytes()

    with Client(daemon.url) as client:
        with pytest.raises(PackError, match="not signed"):
            client.snapshots.unpack("copy", data)
        with pytest.raises(PackError, match="cut short"):
            client.snapshots.unpack("copy", data[:-1], allow_unsigned=True)
        with pytest.raises(InvalidRequest, match="trusted"):
            client.snapshots.unpack("copy", data, trusted=[PUBLIC] * (TRUSTED_KEYS_MAX + 1))
        with pytest.raises(PackError, match="not signed"):
            client.snapshots.unpack("copy", data, trusted=[PUBLIC] * TRUSTED_KEYS_MAX)
        assert client.snapshots.unpack("copy", iter([data]), allow_unsigned=True).links[0].reused


def test_a_damaged_pack_is_refused_and_leaves_nothing(forkd: Forkd, daemon: RunningDaemon) -> None:
    forkd("key", "new")
    forkd("pack", "numpy")
    path = Path("numpy.forkpack")
    path.write_bytes(path.read_bytes()[:-1])

    ended = forkd("unpack", "numpy.forkpack", "--as", "copy")

    assert ended.code == 1
    assert "cut short" in ended.err
    assert Tag("copy") not in daemon.service.stored


def test_a_file_is_not_replaced_unless_told(forkd: Forkd) -> None:
    Path("numpy.forkpack").write_bytes(b"precious")

    assert forkd("pack", "numpy", "--unsigned").code == 4
    assert Path("numpy.forkpack").read_bytes() == b"precious"
    assert forkd("pack", "numpy", "--unsigned", "--force").code == 0


def test_a_pack_that_breaks_off_leaves_no_file(forkd: Forkd) -> None:
    ended = forkd("pack", "numpy-breaks", "--unsigned")

    assert ended.code == 7
    assert list(Path().glob("*numpy*")) == []


def test_what_does_not_exist_is_not_packed(forkd: Forkd) -> None:
    assert forkd("pack", "nope", "--unsigned").code == 3
    assert forkd("unpack", "nope.forkpack").code == 3
    assert forkd("key", "show", "nope").code == 3


def test_a_key_and_none_exclude_each_other(forkd: Forkd) -> None:
    assert forkd("pack", "numpy", "--unsigned", "--key", "x").code == 2


def test_a_snapshot_is_pushed_and_pulled_by_name(
    forkd: Forkd, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    forkd("key", "new")
    monkeypatch.setenv("FORKD_PACKS_URL", web.url())

    pushed = [forkd("push", "numpy", web.url(), "--json").document for _ in range(2)]
    newest = forkd("pull", "numpy", "--as", "newest", "--json").document
    first = forkd("pull", "numpy@1", "--as", "first", "--json").document
    by_url = forkd("pull", web.url("/packs/numpy@2"), "--as", "by-url")

    assert [each["version"] for each in pushed] == ["1", "2"]
    assert newest["snapshot"]["tag"] == "newest"
    assert first["signed_by"] == newest["signed_by"] == pushed[0]["signed_by"]
    assert by_url.code == 0
    assert "by-url" in by_url.err


def test_a_pull_takes_the_packs_own_name(forkd: Forkd, web: Web) -> None:
    forkd("push", "numpy", web.url(), "--unsigned", "--version", "2026-01")

    ended = forkd("pull", "numpy", "--from", web.url(), "--allow-unsigned", "--json")

    assert ended.document["snapshot"]["tag"] == "numpy"


def test_a_pull_of_an_unsigned_pack_is_refused(forkd: Forkd, web: Web) -> None:
    forkd("push", "numpy", web.url("/x.forkpack"), "--unsigned")

    assert forkd("pull", web.url("/x.forkpack"), "--as", "copy").code == 1
    taken = forkd("pull", web.url("/x.forkpack"), "--as", "copy", "--allow-unsigned")
    assert taken.code == 0


def test_a_pull_that_breaks_off_leaves_nothing(
    forkd: Forkd, web: Web, daemon: RunningDaemon
) -> None:
    forkd("key", "new")
    forkd("push", "numpy", web.url("/x.forkpack"))
    web.cut = len(web.files["/x.forkpack"]) - 1

    ended = forkd("pull", web.url("/x.forkpack"), "--as", "copy")

    assert ended.code == 7
    assert Tag("copy") not in daemon.service.stored


def test_keys_are_listed_and_shown(forkd: Forkd) -> None:
    forkd("key", "new", "mine")
    forkd("key", "trust", "alice", keys.show(PUBLIC))

    listed = forkd("key", "ls", "--json").document
    shown = forkd("key", "show", "alice").out.strip()

    assert [(each["name"], each["signs"]) for each in listed] == [("alice", False), ("mine", True)]
    assert shown == keys.show(PUBLIC)
    assert "secret" not in forkd("key", "show", "mine", "--json").out
    assert "alice" in forkd("key", "ls").out
    assert forkd("key", "rm", "mine", "--json").document == {"removed": "mine"}
    assert forkd("key", "trust", "bob", "-", stdin=shown.encode() + b"\n").code == 0
