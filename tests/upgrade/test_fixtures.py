"""What each release left on a host is read by the forkd of today, and used.

`python -m tools.release_fixture` has written them, one for each release, and says what is in one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from typing import TYPE_CHECKING

import pytest

from forkd.model.ids import SandboxId, Tag
from forkd.model.pack import UnpackRequest
from forkd.model.sandbox import ForkOptions, SandboxState
from forkd.model.secret import SecretValue
from forkd.model.snapshot import SnapshotStatus
from forkd.sdk import _contexts
from forkd.service.host import DATABASE_FILE
from forkd.service.vault import Vault
from forkd.store import answers, history, secrets
from forkd.store.database import Database
from tests.support.callers import CALLER
from tests.support.packs import PUBLIC
from tools import release_fixture
from tools.release_fixture import BASE, DELTA, FAILED, TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

RELEASES = sorted(folder.name for folder in release_fixture.RELEASES.iterdir() if folder.is_dir())


@pytest.fixture(params=RELEASES)
def fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What a release left, laid out."""
    archive = release_fixture.RELEASES / request.param / release_fixture.ARCHIVE
    release_fixture.unpack(archive.read_bytes(), tmp_path / "fixture")
    return tmp_path / "fixture"


def lay_out(fixture: Path, host: FakeHost) -> dict[str, str]:
    """Give a host the state of a fixture; returns its names."""
    shutil.copytree(fixture / "state", host.settings.state_dir)
    return release_fixture.names_in(fixture)


async def fork_and_use(service: Host, tag: Tag) -> None:
    (sandbox,) = (
        await service.sandboxes.fork(CALLER, tag, 1, ForkOptions(all_or_nothing=True))
    ).sandboxes
    assert (await service.guests.eval(CALLER, sandbox.id, "1 + 1")).value == 2
    await service.sandboxes.delete(CALLER, sandbox.id)


async def test_all_that_a_release_left_is_listed(
    fixture: Path, fake_host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    names = lay_out(fixture, fake_host)
    caplog.set_level(logging.WARNING)

    async with fake_host.service() as service:
        snapshots = {each.tag: each for each in await service.snapshots.list(CALLER)}
        assert {tag: (each.status, each.depth) for tag, each in snapshots.items()} == {
            BASE: (SnapshotStatus.READY, 0),
            DELTA: (SnapshotStatus.READY, 1),
            FAILED: (SnapshotStatus.FAILED, 0),
        }
        assert snapshots[FAILED].error == "the disk was full"
        found = {each.id: each for each in await service.sandboxes.list(CALLER)}
        source = found.pop(SandboxId(names["source"]))
        (ended,) = found.values()
        assert (source.state, dict(source.labels)) == (SandboxState.EXITED, {"team": "blue"})
        assert (ended.state, ended.exit_reason) == (SandboxState.EXITED, "ended by the fixture")
        token = service.tokens.find(names["token"])
        assert (token.name, token.tenant) == ("ci", TENANT)
        quotas = {each.name: each.quotas for each in await service.tenants.list(CALLER)}
        assert quotas[TENANT].sandboxes == 7
        assert [each.name for each in await service.secrets.list(CALLER)] == ["token"]

    said = [each.getMessage() for each in caplog.records]
    assert not [each for each in said if "damaged" in each or "not readable" in each]


async def test_the_snapshots_of_a_release_are_forked(fixture: Path, fake_host: FakeHost) -> None:
    lay_out(fixture, fake_host)

    async with fake_host.service() as service:
        await fork_and_use(service, BASE)
        await fork_and_use(service, DELTA)


async def test_a_pack_of_a_release_is_unpacked_by_its_signature_and_forked(
    fixture: Path, fake_host: FakeHost
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield (fixture / release_fixture.PACK).read_bytes()

    async with fake_host.service() as service:
        request = UnpackRequest(Tag("pulled"), trusted=(PUBLIC,))
        unpacked = await service.packs.unpack(CALLER, request, pieces())
        assert [each.reused for each in unpacked.links] == [False, False]
        await fork_and_use(service, Tag("pulled"))


def test_secrets_events_and_answers_of_a_release_are_read(fixture: Path) -> None:
    state = fixture / "state"
    vault = Vault(state)
    vault.unlock(make=False)

    with contextlib.closing(Database(state / DATABASE_FILE)) as database:
        ((secret, sealed),) = secrets.secrets(database)
        assert vault.unseal(secret, sealed) == SecretValue(release_fixture.SECRET_VALUE)
        kinds = [each.kind for each in history.between(database, 0, 1_000, 1_000).events]
        assert {"snapshot.ready", "sandbox.ready"} <= set(kinds)
        assert "gap" not in kinds
        (kept,) = answers.kept(database)
        assert (kept.id, kept.tenant) == (release_fixture.ANSWER_ID, TENANT)
        assert answers.read(database, kept.id) == b"answer"


def test_contexts_of_a_release_are_read(fixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(fixture / "config"))

    found = _contexts.chosen()

    assert found == _contexts.Context("https://ci.example.com:8889", "a-token")


def test_a_fixture_has_rows_in_every_table(fixture: Path) -> None:
    found = release_fixture.shape(fixture)["database"]

    tables = {name for name, sql in found["tables"].items() if sql.startswith("CREATE TABLE")}
    assert set(found["filled"]) == tables


def test_a_fixture_that_is_missing_or_of_other_formats_is_named(
    fixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (release := tmp_path / "release").mkdir()
    monkeypatch.setattr(release_fixture, "made", lambda: release_fixture.packed(fixture))
    assert "is missing" in str(release_fixture.difference(release))

    (release / release_fixture.ARCHIVE).write_bytes(release_fixture.packed(fixture))
    assert release_fixture.difference(release) is None

    manifest = fixture / "state" / "snapshots" / BASE / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"another": 1}))
    assert "what this version writes, in: snapshots;" in str(release_fixture.difference(release))
