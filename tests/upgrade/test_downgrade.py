"""What a later forkd wrote is refused by name, before anything is changed: one version above each.

A refusal names the file, its version, the version that this forkd reads, and the way out.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import sqlite3
import struct
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from blake3 import blake3

from forkd.errors import InvalidRequest, PackError, StoreError
from forkd.model.caller import DEFAULT_TENANT
from forkd.model.ids import Tag
from forkd.model.pack import UnpackRequest
from forkd.model.sandbox import ForkOptions
from forkd.model.secret import Secret, SecretValue, parse_hosts
from forkd.model.snapshot import SnapshotStatus
from forkd.packs import index
from forkd.packs.container import read_head
from forkd.packs.manifest import PACK_VERSION
from forkd.sdk import _contexts
from forkd.service.host import DATABASE_FILE
from forkd.service.uninstall import uninstall
from forkd.service.vault import Vault
from forkd.store.headers import Magic
from forkd.store.manifest import MANIFEST_FILE, MANIFEST_VERSION
from forkd.store.pending import PendingStore, Record
from forkd.store.schema import SCHEMA_VERSION
from tests.support.callers import CALLER
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.service_host import FakeHost

WAY_OUT = "a later forkd|or a later one"


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of each file below a folder, but for SQLite's index of the log."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    }


async def with_a_snapshot(host: FakeHost) -> bytes:
    """Leave a state folder with one snapshot; return its pack."""
    async with host.service() as service:
        await host.bake(service, host.recipe())
        return b"".join([piece async for piece in service.packs.pack(CALLER, TAG)])


def refusal(version: int, known: int) -> str:
    return rf"version {version}, and (this forkd|we) reads? (up to )?{known}[:;] .*({WAY_OUT})"


@pytest.mark.parametrize("written", ["into the file", "into the log"])
async def test_a_database_of_a_later_version_keeps_the_daemon_from_starting_and_is_left_as_it_is(
    fake_host: FakeHost, written: str
) -> None:
    await with_a_snapshot(fake_host)
    state = fake_host.settings.state_dir
    writer = sqlite3.connect(state / DATABASE_FILE)
    with contextlib.closing(writer):
        writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        if written == "into the file":
            writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        before = contents(state)
        refused = rf"{DATABASE_FILE} has {refusal(SCHEMA_VERSION + 1, SCHEMA_VERSION)}"

        with pytest.raises(StoreError, match=refused):
            async with fake_host.service():
                pass
        with pytest.raises(StoreError, match=refused):
            await uninstall(fake_host.settings, state=True)

        assert contents(state) == before


async def test_a_log_that_a_later_daemon_left_behind_is_not_written_into_the_database(
    fake_host: FakeHost,
) -> None:
    await with_a_snapshot(fake_host)
    state = fake_host.settings.state_dir
    path, log = state / DATABASE_FILE, state / f"{DATABASE_FILE}-wal"
    with contextlib.closing(sqlite3.connect(path)) as writer:
        writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        left = path.read_bytes(), log.read_bytes()
    path.write_bytes(left[0])
    log.write_bytes(left[1])  # as a daemon that was killed leaves both
    before = contents(state)

    with pytest.raises(StoreError, match=refusal(SCHEMA_VERSION + 1, SCHEMA_VERSION)):
        async with fake_host.service():
            pass

    assert contents(state) == before


def later_manifest(folder: Path) -> None:
    said = json.loads((folder / MANIFEST_FILE).read_text())
    said |= {"version": MANIFEST_VERSION + 1, "what_we_do_not_know": 1}
    (folder / MANIFEST_FILE).write_text(json.dumps(said))


def later_file(name: str, magic: Magic) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        raw = bytearray((folder / name).read_bytes())
        raw[8:12] = struct.pack("<I", magic.version + 1)
        raw[56:64] = blake3(raw[:56]).digest()[:8]
        (folder / name).write_bytes(raw)

    return change


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (later_manifest, refusal(MANIFEST_VERSION + 1, MANIFEST_VERSION)),
        (later_file("state", Magic.STATE), f"state is too new: it has {refusal(3, 2)}"),
        (later_file("memory", Magic.MEMORY), f"memory is too new: it has {refusal(2, 1)}"),
    ],
    ids=["manifest", "state", "memory"],
)
async def test_a_snapshot_of_a_later_version_is_refused_by_name_and_kept_with_its_image(
    fake_host: FakeHost, change: Callable[[Path], None], refused: str
) -> None:
    await with_a_snapshot(fake_host)
    state = fake_host.settings.state_dir
    change(state / "snapshots" / TAG)
    kept = {name: each for name, each in contents(state).items() if "/" in name}

    async with fake_host.service() as service:
        (found,) = await service.snapshots.list(CALLER)
        assert found.status is SnapshotStatus.FAILED
        assert re.search(refused, str(found.error))
        with pytest.raises(StoreError, match=refused):
            await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())
        assert await service.snapshots.tidy(CALLER) == ()

    assert {name: each for name, each in contents(state).items() if "/" in name} == kept


def test_a_record_of_a_later_version_is_left_alone_and_a_damaged_one_is_removed(
    tmp_path: Path,
) -> None:
    pending = PendingStore(tmp_path)
    pending.prepare()
    pending.put(Record(tag="later", created_at=datetime.now(UTC)))
    later, damaged = (tmp_path / "writing" / f"{name}.json" for name in ("later", "damaged"))
    later.write_text(json.dumps(json.loads(later.read_text()) | {"another": 1}))
    damaged.write_text('{"tag": "damaged", "another": 1}')
    before = later.read_text()

    assert pending.records() == ()

    assert later.read_text() == before
    assert not damaged.exists()


async def test_a_pack_of_a_later_version_is_refused_by_name_and_leaves_nothing(
    fake_host: FakeHost,
) -> None:
    pack = await with_a_snapshot(fake_host)
    later = pack[:8] + struct.pack("<I", PACK_VERSION + 1) + pack[12:]
    refused = f"this pack has {refusal(PACK_VERSION + 1, PACK_VERSION)}"

    async def pieces() -> AsyncIterator[bytes]:
        yield later

    with pytest.raises(PackError, match=refused):
        read_head(io.BytesIO(later))
    async with fake_host.service() as service:
        before = contents(fake_host.settings.state_dir / "snapshots")
        with pytest.raises(PackError, match=refused):
            await service.packs.unpack(
                CALLER, UnpackRequest(Tag("other"), allow_unsigned=True), pieces()
            )
        assert contents(fake_host.settings.state_dir / "snapshots") == before
        assert fake_host.left_over() == []


def test_an_index_of_a_later_version_is_refused_by_name() -> None:
    later = index.INDEX_VERSION + 1
    raw = json.dumps({"version": later, "packs": [], "other": 1}).encode()

    with pytest.raises(PackError, match=f"the index has {refusal(later, index.INDEX_VERSION)}"):
        index.parse(raw)


def test_an_index_that_is_no_json_is_refused() -> None:
    with pytest.raises(PackError, match="the index is refused: it is no JSON"):
        index.parse(b"{")


def test_contexts_of_a_later_version_are_refused_by_name_and_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    made = _contexts.Contexts()
    made.add("ci", _contexts.Context("http://ci:1"))
    made.save()
    path = _contexts.contexts_file()
    said = json.loads(path.read_text())
    assert said["version"] == _contexts.CONTEXTS_VERSION
    later = _contexts.CONTEXTS_VERSION + 1
    path.write_text(json.dumps(said | {"version": later}))
    before = contents(tmp_path)

    with pytest.raises(
        InvalidRequest, match=rf"contexts\.json has {refusal(later, _contexts.CONTEXTS_VERSION)}"
    ):
        _contexts.load()

    assert contents(tmp_path) == before


def test_contexts_without_a_version_are_read_and_with_a_word_for_one_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = _contexts.contexts_file()
    path.parent.mkdir()
    path.write_text('{"contexts": {"ci": {"url": "http://ci:1"}}}')
    assert _contexts.load().get("ci").url == "http://ci:1"

    path.write_text('{"version": "new", "contexts": {}}')
    with pytest.raises(InvalidRequest, match="does not hold contexts"):
        _contexts.load()


def test_a_secret_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    vault.unlock(make=True)
    hosts = parse_hosts(["api.example.com"])
    secret = Secret("token", DEFAULT_TENANT, hosts, "Authorization", None, datetime.now(UTC))
    sealed = vault.seal(secret, SecretValue("value"))

    with pytest.raises(StoreError, match=f"secret token is stored in {refusal(2, 1)}"):
        vault.unseal(secret, b"\x02" + sealed[1:])
