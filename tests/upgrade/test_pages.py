"""The commands of the pages about upgrades and backups do what the pages say, as they stand."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.errors import StoreError
from forkd.model.ids import SandboxId, Tag
from forkd.model.sandbox import ForkOptions, SandboxState
from forkd.service.host import DATABASE_FILE
from forkd.service.vault import KEY_FILE
from forkd.store import schema
from tests.support.callers import CALLER
from tests.support.docs import ROOT, blocks
from tests.support.served_host import served_host
from tests.support.service_host import TAG
from tools import release_fixture
from tools.release_fixture import BASE, DELTA, TENANT

if TYPE_CHECKING:
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

BACK_UP = ROOT / "docs/howto/back-up.md"
UPGRADE = ROOT / "docs/howto/upgrade.md"
RUN_TIMEOUT_S = 120


def run(page: Path, block: int, replaced: dict[str, str], **variables: str) -> str:
    """Run a shell block of a page, with other folders than it names; return what it prints."""
    code = blocks(page, "sh")[block].code
    for text, other in replaced.items():
        assert text in code
        code = code.replace(text, other)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(  # noqa: S603 - our own documentation
        ["/bin/bash", "-euc", code],
        env={**os.environ, **variables, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def lay_out(host: FakeHost, to: Path) -> dict[str, str]:
    """Give a host what the newest release left; returns its names."""
    newest = max(release_fixture.RELEASES.glob(f"*/{release_fixture.ARCHIVE}"))
    release_fixture.unpack(newest.read_bytes(), to)
    (to / "state").rename(host.settings.state_dir)
    return release_fixture.names_in(to)


async def check_use(service: Host, names: dict[str, str]) -> None:
    """Fail unless a host has all of a release's fixture, and forks its snapshots."""
    assert service.tokens.find(names["token"]).tenant == TENANT
    quotas = {each.name: each.quotas for each in await service.tenants.list(CALLER)}
    assert quotas[TENANT].sandboxes == 7
    assert [each.name for each in await service.secrets.list(CALLER)] == ["token"]
    found = {each.id: each.state for each in await service.sandboxes.list(CALLER)}
    assert found[SandboxId(names["source"])] is SandboxState.EXITED
    for tag in (BASE, DELTA):
        options = ForkOptions(all_or_nothing=True)
        (sandbox,) = (await service.sandboxes.fork(CALLER, tag, 1, options)).sandboxes
        assert (await service.guests.eval(CALLER, sandbox.id, "1 + 1")).value == 2
        await service.sandboxes.delete(CALLER, sandbox.id)


async def test_a_copy_of_a_running_daemon_is_restored_elsewhere(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    names = lay_out(fake_host, tmp_path / "fixture")
    state, copy = fake_host.settings.state_dir, tmp_path / "backup" / "forkd"
    (state / "audit.log").write_text("{}\n")
    at = {"/var/lib/forkd": str(state), "/backup/forkd": str(copy)}

    async with fake_host.service() as service:
        options = ForkOptions(all_or_nothing=True)
        (running,) = (await service.sandboxes.fork(CALLER, TAG, 1, options)).sandboxes
        await asyncio.to_thread(run, BACK_UP, 0, at)
        await service.sandboxes.delete(CALLER, running.id)
        await service.snapshots.delete(CALLER, Tag(BASE), cascade=True)
        await service.secrets.remove(CALLER, "token")
    open_to_others = [path for path in copy.rglob("*") if path.stat().st_mode & 0o077]
    assert open_to_others == []
    assert {path.name for path in copy.iterdir()} == {
        "snapshots.tar", DATABASE_FILE, KEY_FILE, "audit.log"
    }  # fmt: skip

    state.rename(tmp_path / "moved away")
    await asyncio.to_thread(run, BACK_UP, 1, at)
    async with fake_host.service() as service:
        await check_use(service, names)
        left = {each.id: each.state for each in await service.sandboxes.list(CALLER)}
        assert left[running.id] is SandboxState.EXITED


async def test_a_state_folder_without_secrets_is_copied_too(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        at = {"/var/lib/forkd": str(fake_host.settings.state_dir), "/backup/forkd": f"{tmp_path}/b"}
        await asyncio.to_thread(run, BACK_UP, 0, at)

    assert {path.name for path in (tmp_path / "b").iterdir()} == {"snapshots.tar", DATABASE_FILE}


async def test_the_check_after_an_upgrade_shows_what_the_release_before_left(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    names = lay_out(fake_host, tmp_path / "fixture")

    async with served_host(fake_host, baked=True) as served:
        said = await asyncio.to_thread(run, UPGRADE, 0, {}, FORKD_URL=served.url)
        await check_use(served.service, names)

    assert all(word in said for word in (BASE, DELTA, names["source"]))


async def test_to_go_back_needs_the_copy_from_before_and_the_refusal_is_the_pages(
    fake_host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = lay_out(fake_host, tmp_path / "fixture")
    state, copy = fake_host.settings.state_dir, tmp_path / "copy"
    at = {"/var/lib/forkd": str(state), "/backup/forkd": str(copy)}
    async with fake_host.service():
        pass
    await asyncio.to_thread(run, BACK_UP, 0, at)
    newer = schema.SCHEMA_VERSION + 1
    with monkeypatch.context() as upgraded:
        upgraded.setattr(
            "forkd.store.database.MIGRATIONS", (*schema.MIGRATIONS, "CREATE TABLE more (id);")
        )
        upgraded.setattr("forkd.store.database.SCHEMA_VERSION", newer)
        async with fake_host.service() as service:
            await check_use(service, names)

    with pytest.raises(StoreError) as refused:
        async with fake_host.service():
            pass
    said = str(refused.value).replace(str(state), "/var/lib/forkd")
    (shown,) = blocks(UPGRADE, "text")
    assert shown.code == f"error: {said} (store)\n"
    shutil.rmtree(state)
    await asyncio.to_thread(run, BACK_UP, 1, at)
    async with fake_host.service() as service:
        await check_use(service, names)
