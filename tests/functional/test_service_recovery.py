"""A daemon that was killed at any point leaves nothing that its successor does not handle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.daemon.pages import by_age
from forkd.engine.process import CONFIG_OPTION, KILL_TIMEOUT_S, LOG_FILE
from forkd.errors import Conflict, HostError
from forkd.host import proc
from forkd.host.spawn import Process
from forkd.model.paging import PageRequest
from forkd.model.sandbox import ForkOptions, SandboxState
from forkd.service import recovery, seeds
from forkd.service.host import DATABASE_FILE
from forkd.store.database import Database
from tests.support.callers import CALLER
from tests.support.killable import KillableDaemon
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.service_host import FakeHost

WRITE = """(source,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        await service.branches.branch(
            CALLER, source.id, 1, BranchOptions(), tag=Tag("later"), wait=False)"""
FORK = "await service.sandboxes.fork(CALLER, TAG, 3, ForkOptions())"
DELETE = """(sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        os.kill(sandbox.pid, signal.SIGSTOP)
        await service.sandboxes.delete(CALLER, sandbox.id)"""
BAKE = """async for event in service.snapshots.bake(CALLER, SnapshotRequest(TAG, Path({recipe!r}))):
            pass"""


def folders_in(path: Path) -> int:
    return len(list(path.iterdir())) if path.exists() else 0


async def baked(host: FakeHost, knobs: str = "") -> None:
    async with host.service() as service:
        await host.bake(service, host.recipe(knobs=knobs))


async def test_a_daemon_killed_in_a_bake_leaves_nothing_after_the_next_start(
    fake_host: FakeHost,
) -> None:
    recipe = fake_host.recipe(code="hang")
    daemon = KillableDaemon(fake_host, BAKE.format(recipe=str(recipe)))
    bakes = fake_host.settings.bakes_dir
    await daemon.kill_when(
        lambda: any(bakes.glob("*/console.log")) and fake_host.vmm_processes() != []
    )

    async with fake_host.service() as service:
        assert fake_host.vmm_processes() == []
        assert fake_host.left_over() == []
        assert await service.snapshots.list(CALLER) == ()


async def test_a_daemon_killed_in_a_fork_leaves_nothing_after_the_next_start(
    fake_host: FakeHost,
) -> None:
    await baked(fake_host, knobs="fork=hang")
    daemon = KillableDaemon(fake_host, FORK)
    sandboxes = fake_host.settings.sandboxes_dir
    await daemon.kill_when(lambda: len(list(sandboxes.glob("*/control.sock"))) == 3)
    assert len(fake_host.vmm_processes()) == 4

    async with fake_host.service() as service:
        assert fake_host.vmm_processes() == []
        assert fake_host.left_over() == []
        assert await service.sandboxes.list(CALLER) == ()


async def test_sandboxes_outlive_a_killed_daemon_and_are_adopted(fake_host: FakeHost) -> None:
    await baked(fake_host)
    ready = fake_host.folder / "ready"
    daemon = KillableDaemon(fake_host, f"{FORK}; Path({str(ready)!r}).touch()")
    await daemon.kill_when(ready.exists)

    async with fake_host.service() as service:
        sandboxes = await service.sandboxes.list(CALLER)
        assert [sandbox.state for sandbox in sandboxes] == [SandboxState.RUNNING] * 3
        assert {sandbox.pid for sandbox in sandboxes} == set(fake_host.vmm_processes())
        for sandbox in sandboxes:
            assert (await service.guests.eval(CALLER, sandbox.id, "answer")).value == 42
            await service.sandboxes.delete(CALLER, sandbox.id)

        assert fake_host.vmm_processes() == []
        assert fake_host.left_over() == []


async def test_sandboxes_are_listed_in_the_order_in_which_a_fork_names_them_also_once_adopted(
    fake_host: FakeHost,
) -> None:
    await baked(fake_host)
    async with fake_host.service() as service:
        forks = [await service.sandboxes.fork(CALLER, TAG, n, ForkOptions()) for n in (6, 2)]
        made = [each.id for fork in forks for each in fork.sandboxes]
        before = await service.sandboxes.list(CALLER)

    async with fake_host.service() as service:
        after = await service.sandboxes.list(CALLER)
        for sandbox in after:
            await service.sandboxes.delete(CALLER, sandbox.id)

    assert [each.id for each in before] == made
    assert [each.id for each in after] == made
    assert [each.id for each in PageRequest(limit=8).of(after, by_age).items] == made


async def test_a_seed_that_was_still_writing_is_left_to_its_siblings_and_ends_with_them(
    fake_host: FakeHost,
) -> None:
    await baked(fake_host, knobs="link=wait")
    ready = fake_host.folder / "ready"
    daemon = KillableDaemon(fake_host, f"{WRITE}; Path({str(ready)!r}).touch()")
    await daemon.kill_when(ready.exists)
    assert len(fake_host.vmm_processes()) == 4  # a zygote, a source, its seed and a sibling

    async with fake_host.service() as service:
        source, sibling = await service.sandboxes.list(CALLER)
        assert [source.pid, sibling.pid] == fake_host.vmm_processes()
        assert sibling.pid is not None
        (seed,) = seeds.retired_for([sibling.pid])
        await service.guests.eval(CALLER, sibling.id, "globals().update(answer=0)")
        await service.sandboxes.reset(CALLER, sibling.id, deadline_s=5.0)
        assert (await service.guests.eval(CALLER, sibling.id, "answer")).value == 42

        for sandbox in (source, sibling):
            await service.sandboxes.delete(CALLER, sandbox.id)
        await until(lambda: seed not in proc.processes())
        assert fake_host.vmm_processes() == []
        assert fake_host.left_over() == []


async def test_a_sandbox_that_died_without_a_daemon_is_found_exited(fake_host: FakeHost) -> None:
    await baked(fake_host)
    async with fake_host.service() as service:
        silent, dead, alive = (
            await service.sandboxes.fork(CALLER, TAG, 3, ForkOptions())
        ).sandboxes
    said = fake_host.settings.sandboxes_dir / dead.id / LOG_FILE
    said.write_text("the guest reset itself\n")
    for each in (silent, dead):
        assert each.pid is not None
        os.kill(each.pid, signal.SIGKILL)
    await until(lambda: fake_host.vmm_processes() == [alive.pid])

    async with fake_host.service() as service:
        unseen = "it ended while no daemon was running"
        assert (await service.sandboxes.get(CALLER, silent.id)).exit_reason == unseen
        found = await service.sandboxes.get(CALLER, dead.id)
        assert (found.state, found.exit_reason) == (
            SandboxState.EXITED,
            f"{unseen}: the guest reset itself",
        )
        assert b"hello" in await service.sandboxes.console_log(CALLER, dead.id)
        assert (await service.sandboxes.get(CALLER, alive.id)).state is SandboxState.RUNNING
        for sandbox in (silent, dead, alive):
            await service.sandboxes.delete(CALLER, sandbox.id)
        assert fake_host.left_over() == []


async def test_a_deletion_that_a_killed_daemon_had_begun_is_finished_at_the_next_start(
    fake_host: FakeHost,
) -> None:
    await baked(fake_host)
    daemon = KillableDaemon(fake_host, DELETE)
    with closing(Database(fake_host.settings.state_dir / DATABASE_FILE)) as database:
        await daemon.kill_when(
            lambda: [row.sandbox.state for row in database.rows()] == [SandboxState.STOPPING]
        )
    assert len(fake_host.vmm_processes()) == 2  # the zygote, and the machine, which is paused

    async with fake_host.service() as service:
        assert await service.sandboxes.list(CALLER) == ()
        assert fake_host.vmm_processes() == []
        assert fake_host.left_over() == []


async def test_stopping_the_service_ends_zygotes_but_no_sandbox(fake_host: FakeHost) -> None:
    await baked(fake_host)
    async with fake_host.service() as service:
        (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes

    assert fake_host.vmm_processes() == [sandbox.pid]

    async with fake_host.service() as service:
        await service.sandboxes.delete(CALLER, sandbox.id)


async def test_what_has_no_row_is_removed_at_the_start(fake_host: FakeHost) -> None:
    await baked(fake_host)
    stray = fake_host.settings.sandboxes_dir / "sb-unknown"
    stray.mkdir()
    (stray / "disk.top").touch()

    async with fake_host.service():
        assert fake_host.left_over() == []


@pytest.fixture
def stray(fake_host: FakeHost) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a VMM of no sandbox."""
    config = fake_host.settings.run_dir / "stray"
    command = [sys.executable, "-c", "import signal; signal.pause()", CONFIG_OPTION, str(config)]
    with subprocess.Popen(command) as process:  # noqa: S603 - ours
        yield process
        process.kill()


async def test_a_process_that_survives_a_kill_does_not_keep_the_next_daemon_from_starting(
    fake_host: FakeHost,
    stray: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Process, "kill", lambda _: None)  # as if it waited for a broken disk
        patch.setattr(recovery, "KILL_TIMEOUT_S", 0.01)
        async with fake_host.service() as service:
            assert await service.snapshots.list(CALLER) == ()
    assert stray.poll() is None
    assert "a stray process survives SIGKILL" in caplog.text

    async with fake_host.service():
        stray.wait(KILL_TIMEOUT_S)  # the daemon, which is its parent here, knows how it ended


async def test_two_services_cannot_have_the_same_folders(fake_host: FakeHost) -> None:
    async with fake_host.service():
        with pytest.raises(Conflict, match="another daemon"):
            async with fake_host.service():
                pass


async def test_without_cgroups_that_every_sandbox_needs_a_host_does_not_open(
    fake_host: FakeHost,
) -> None:
    strict = replace(fake_host, settings=replace(fake_host.settings, cgroups=True))

    with pytest.raises(HostError, match=r"no cgroup v2 with cpu, memory, pids .*FORKD_CGROUPS=off"):
        async with strict.service():
            pass

    async with fake_host.service() as service:
        assert await service.sandboxes.list(CALLER) == ()


async def test_a_host_that_is_closed_begins_nothing(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())

    with pytest.raises(Conflict, match="stopping"):
        await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())
    assert fake_host.vmm_processes() == []
