"""A host on which a daemon has run, and was killed, is as it was before it was there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forkd import Client
from forkd.errors import Conflict
from forkd.host import sockets
from forkd.machine import lifecycle
from forkd.model.secret import SecretRequest, SecretValue, parse_hosts
from forkd.service.names import derive
from forkd.service.uninstall import uninstall
from forkd.service.vault import KEY_FILE
from tests.support import leaks
from tests.support.callers import CALLER
from tests.support.killable import KillableDaemon
from tests.support.real_daemon import running_daemon
from tests.support.real_host import REAL, RECIPE, TAG
from tests.support.service_host import make_host, until

if TYPE_CHECKING:
    from tests.support.bakes import Bakes
    from tests.support.real_daemon import Daemon
    from tests.support.service_host import FakeHost

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(120)]

WITH_NETWORK = "ForkOptions(network=HOST)"
FORK = """from forkd.model.network import HOST
        await service.sandboxes.fork(CALLER, TAG, 3, {options})
        Path({ready!r}).touch()"""


def command(host: FakeHost, *more: str) -> tuple[int, dict[str, Any], str]:
    """Run `forkd-daemon uninstall`; return its status, what it said, and what was wrong."""
    settings = host.settings
    done = subprocess.run(  # noqa: S603 - our own arguments
        [
            *(sys.executable, "-m", "forkd.daemon", "uninstall", "--json", *more),
            *("--run-dir", str(settings.run_dir), "--state-dir", str(settings.state_dir)),
            *("--cache-dir", str(settings.cache_dir), "--socket", str(settings.run_dir / "sock")),
        ],
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout or b"{}"), done.stderr.decode()


async def killed_with_sandboxes(host: FakeHost, options: str) -> None:
    async with host.service() as service:
        await host.bake(service, host.recipe())
    ready = host.folder / "ready"
    daemon = KillableDaemon(host, FORK.format(options=options, ready=str(ready)))
    await daemon.kill_when(ready.exists)


def users() -> list[str]:
    return [Path(name).read_text() for name in ("/etc/passwd", "/etc/group", "/etc/subuid")]


async def test_the_key_of_secrets_goes_with_the_database(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        hosts = parse_hosts(["api.example.com"])
        request = SecretRequest("token", SecretValue("a-secret-value"), hosts)
        await service.secrets.put(CALLER, request)
    assert (fake_host.settings.state_dir / KEY_FILE).exists()

    found = await uninstall(fake_host.settings, state=True)

    assert found.left == []
    assert not fake_host.settings.state_dir.exists()


@pytest.mark.needs("tun", "nft")
async def test_nothing_is_left_of_a_daemon_that_was_killed(fake_host: FakeHost) -> None:
    before, known = leaks.take(), await asyncio.to_thread(users)
    await killed_with_sandboxes(fake_host, WITH_NETWORK)
    during = leaks.take()
    assert len(fake_host.vmm_processes()) == 4  # a zygote and three sandboxes
    assert any("fk" in each for each in during.interfaces - before.interfaces)
    assert during.tables > before.tables

    status, said, wrong = await asyncio.to_thread(command, fake_host, "--state")

    assert (status, said["left"], wrong) == (0, [], "")
    assert fake_host.vmm_processes() == []
    leaks.await_ending(before.processes)
    assert leaks.leaked(before, leaks.take()) == []
    assert await asyncio.to_thread(users) == known
    settings = fake_host.settings
    for folder in (settings.run_dir, settings.state_dir, settings.cache_dir):
        assert not folder.exists()
    assert {"processes", "links", "tables", "folders"} <= set(said["removed"])
    assert len(said["removed"]["processes"]) == 4
    settings.run_dir.mkdir()  # whose the fixture is


def test_down_ends_the_sandboxes_of_a_daemon_of_this_host_that_was_killed(tmp_path: Path) -> None:
    run_dir = Path(f"/run/forkd-{os.getuid()}")
    host, home = make_host(tmp_path, run_dir), tmp_path / "home"
    run_dir.mkdir(mode=0o700)
    asyncio.run(killed_with_sandboxes(host, "ForkOptions()"))
    assert len(host.vmm_processes()) == 4  # a zygote and three sandboxes
    home.mkdir()
    host.settings.state_dir.rename(home / "store")

    assert lifecycle.down(home) is True

    assert host.vmm_processes() == []
    assert not run_dir.exists()
    assert lifecycle.down(home) is False


async def test_without_state_snapshots_stay_and_the_next_daemon_has_them(
    fake_host: FakeHost,
) -> None:
    await killed_with_sandboxes(fake_host, "ForkOptions()")

    status, said, _ = await asyncio.to_thread(command, fake_host)

    assert (status, said["left"]) == (0, [])
    assert not fake_host.settings.run_dir.exists()
    async with fake_host.service() as service:
        assert len(await service.snapshots.list(CALLER)) == 1
        assert await service.sandboxes.list(CALLER) == ()


async def test_a_daemon_that_runs_keeps_it_out(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        with pytest.raises(Conflict, match=r"a daemon uses .*: stop it first"):
            await uninstall(fake_host.settings, state=True)
        status, said, wrong = await asyncio.to_thread(command, fake_host, "--state")
        assert (status, said) == (1, {})
        assert "stop it first" in wrong
        assert len(await service.snapshots.list(CALLER)) == 1


async def test_what_is_not_ours_stays_and_is_named(fake_host: FakeHost) -> None:
    await killed_with_sandboxes(fake_host, "ForkOptions()")
    settings = fake_host.settings
    theirs = settings.state_dir / "letters"
    theirs.write_text("dear")

    found = await uninstall(settings, state=True)

    assert found.left == [f"{settings.state_dir} has letters"]
    assert theirs.read_text() == "dear"
    assert [each.name for each in settings.state_dir.iterdir()] == ["letters"]
    settings.run_dir.mkdir()


async def test_a_host_where_there_never_was_a_daemon_or_its_database_is_gone(
    fake_host: FakeHost,
) -> None:
    found = await uninstall(fake_host.settings, state=True)
    assert found.left == []
    fake_host.settings.run_dir.mkdir(exist_ok=True)
    await killed_with_sandboxes(fake_host, "ForkOptions()")
    shutil.rmtree(fake_host.settings.state_dir)

    found = await uninstall(fake_host.settings, state=True)

    assert found.left == []
    await until(lambda: fake_host.vmm_processes() == [])
    fake_host.settings.run_dir.mkdir()


async def test_who_has_the_addresses_of_a_daemon_that_is_gone_does_not_keep_it_out(
    fake_host: FakeHost,
) -> None:
    settings = fake_host.settings
    taken = sockets.take_name(f"forkd/addresses/{derive(settings.run_dir).network.pool}")
    with contextlib.nullcontext() if taken is None else taken:  # else another test's daemon has it
        found = await uninstall(settings, state=True)

    assert found.left == []
    settings.run_dir.mkdir(exist_ok=True)


@pytest.mark.soak(only=True)
@REAL
def test_nothing_is_left_of_a_real_daemon_with_sandboxes(bakes: Bakes) -> None:
    before = leaks.take()
    with running_daemon(bakes.of(RECIPE)) as made:
        with Client(made.url) as client:
            client.fork(TAG, n=2, memory_limit_mib=768, network=True)
        made.end(signal.SIGKILL)
        during = leaks.take()
        assert len(made.vmm_processes()) == 3
        for kind in ("interfaces", "tables", "cgroups"):
            assert getattr(during, kind) > getattr(before, kind), kind

        found = asyncio.run(uninstall(made.settings, socket_of(made), state=True))

        assert made.vmm_processes() == set()
        folders = [each for each in (made.state, made.run_dir) if each.exists()]
        for each in (made.state, made.run_dir):
            each.mkdir(exist_ok=True)  # whose it removes in the end
    leaks.await_ending(before.processes)
    assert leaks.leaked(before, leaks.take()) == []
    assert found.left == []
    assert folders == []


def socket_of(made: Daemon) -> tuple[Path, ...]:
    return tuple(made.run_dir / name for name in ("forkd.sock", "log"))
