"""The audit log of a daemon in a process of its own, and on a disk that is really full."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import Client
from forkd.errors import CapacityError
from forkd.sdk import AsyncClient
from tests.support.audited import DEADLINE_S, audited, lines_of
from tests.support.fake_daemon import FakeDaemon
from tests.support.mounts import mounted
from tests.support.service_host import TAG, fake_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.service_host import FakeHost

__all__ = ["fake_host"]

SECRET = "hunter2-hunter2"  # noqa: S105 - to be looked for


def until(condition: Callable[[], bool]) -> None:
    """Return once another process has done something."""

    async def wait() -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - the event is another process'
                await asyncio.sleep(0.001)

    asyncio.run(wait())


def test_a_run_with_secrets_everywhere_leaves_none_of_them_in_the_log(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKD_HIDDEN", SECRET)
    log = fake_host.settings.state_dir / "audit.log"
    with FakeDaemon(fake_host) as daemon, Client(daemon.url, token=SECRET) as client:
        client.snapshots.create(TAG, recipe=str(fake_host.recipe()))
        (sandbox,) = client.fork(TAG)
        sandbox.eval(f"secret = {SECRET!r}")
        sandbox.exec(["echo", SECRET], env={"SECRET": SECRET}, stdin=SECRET)
        sandbox.files.write("/file", SECRET.encode())
        made = client.tokens.create("ci", ["read"])
        asks = (
            ("GET", f"/v2/sandboxes?token={SECRET}"),
            ("GET", f"/{SECRET}"),
            ("DELETE", f"/v2/tokens/{SECRET}"),
            ("DELETE", f"/v2/snapshots/{SECRET}"),
            (SECRET.upper(), "/v2/sandboxes"),
        )
        headers = dict.fromkeys(("Cookie", "X-Request-Id", "User-Agent", "X-Secret"), SECRET)
        for method, path in asks:
            daemon.http.request(method, path, headers=headers, content=SECRET)
        sandbox.kill()

    said = log.read_text()
    assert SECRET.lower() not in said.lower()
    assert made.token not in said
    lines = lines_of(log)
    objects = {line["action"]: line["objects"] for line in lines if line["result"] == "ok"}
    assert objects["create_snapshot"] == [TAG]
    assert objects["fork"] == [TAG, sandbox.id]
    assert objects["eval"] == objects["delete_sandbox"] == [sandbox.id]
    assert (lines[0]["action"], lines[-1]["action"]) == ("start", "stop")
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_hangup_has_both_logs_go_on_in_new_files(fake_host: FakeHost) -> None:
    log = fake_host.settings.state_dir / "audit.log"
    with FakeDaemon(fake_host) as daemon:
        until(lambda: lines_of(log) != [])
        for path in (log, daemon.log):
            path.rename(path.with_suffix(".1"))
        os.kill(daemon.pid, signal.SIGHUP)
        until(lambda: log.exists() and log.read_text().endswith("\n"))
        assert daemon.http.get("/v2/sandboxes").status_code == 200
        until(lambda: len(lines_of(log)) == 2)

        reload, listed = lines_of(log)
        assert (reload["action"], reload["result"]) == ("reload", "ok")
        assert reload["objects"] == ["config", "log", "audit_log"]
        assert listed["action"] == "list_sandboxes"
        assert "reloaded" in daemon.log.read_text()
        assert [each["action"] for each in lines_of(log.with_suffix(".1"))] == ["start"]


def test_a_daemon_does_not_start_with_a_log_that_others_may_read(fake_host: FakeHost) -> None:
    fake_host.settings.state_dir.mkdir(mode=0o700)
    log = fake_host.settings.state_dir / "audit.log"
    log.touch()
    log.chmod(0o644)

    daemon = FakeDaemon(fake_host)
    with pytest.raises(AssertionError, match=f"chmod 600 {log}"):
        daemon.__enter__()
    daemon.until_ended()
    daemon.__exit__(None, None, None)
    assert daemon.status == 1
    assert log.read_text() == ""


@pytest.fixture
def disk() -> Iterator[Path]:
    """A disk with room for some thousand lines."""
    with tempfile.TemporaryDirectory(prefix="forkd-audit-") as name:
        folder = Path(name)
        with mounted("tmpfs", folder, options="size=4m"):
            yield folder


def fill(disk: Path) -> Path:
    """Take all room that a disk has."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return filler
    raise AssertionError("it has no end")


@pytest.mark.needs("root")
async def test_on_a_full_disk_only_reads_are_served_until_there_is_room_if_so_wanted(
    disk: Path, tmp_path: Path
) -> None:
    async with audited(tmp_path, audit_log=disk / "audit.log", audit_full="refuse") as daemon:
        filler = fill(disk)
        async with AsyncClient(daemon.unix_url, retries_max=0) as client:
            await client.tokens.list()  # the first line that finds no room
            async with asyncio.timeout(DEADLINE_S):
                while await made_a_token(client):
                    pass
            with pytest.raises(CapacityError, match=r"No space left.*only reads are served"):
                await client.tokens.create("more", ["read"])
            before = len(await client.tokens.list())

            filler.unlink()
            async with asyncio.timeout(DEADLINE_S):
                while not await made_a_token(client):
                    pass
            assert len(await client.tokens.list()) == before + 1

    actions = [each["action"] for each in lines_of(disk / "audit.log")]
    assert actions[0] == "list_tokens"
    assert set(actions) == {"list_tokens", "create_token"}  # none was lost
    results = {each["result"] for each in lines_of(disk / "audit.log")}
    assert results == {"ok", "refused"}


async def made_a_token(client: AsyncClient) -> bool:
    try:
        await client.tokens.create(f"t{os.urandom(8).hex()}", ["read"])
    except CapacityError:
        return False
    return True


@pytest.mark.needs("root")
async def test_on_a_full_disk_everything_is_served_and_what_is_lost_is_counted_otherwise(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkd.telemetry.audit.QUEUE_BYTES_MAX", 4_096)
    async with audited(tmp_path, audit_log=disk / "audit.log") as daemon:
        filler = fill(disk)
        async with AsyncClient(daemon.unix_url) as client:
            for _ in range(100):
                assert await made_a_token(client)
        filler.unlink()

    lost = daemon.log.lost
    assert 0 < lost < 100
    lines = lines_of(disk / "audit.log")  # a request may be answered before it is written down
    (said,) = [each for each in lines if each["action"] == "audit_lost"]
    assert said in lines[-2:]
    lines.remove(said)
    assert said["lost"] == lost
    assert [each["action"] for each in lines] == ["create_token"] * (100 - lost)
