"""Whenever a daemon or a writer is killed, a snapshot is whole or is not there."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from forkd.errors import EngineError
from forkd.model.ids import parse_tag
from forkd.model.sandbox import SandboxState
from forkd.model.snapshot import SnapshotStatus
from forkd.service.snapshots import stored
from tests.support.callers import CALLER
from tests.support.chains import ONE, A, B, C, add_link, chain, forked, freed, value
from tests.support.killable import KillableDaemon
from tests.support.service_host import TAG
from tests.support.stored import read_stored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

ROUNDS = 8
KILL_WITHIN_S = 0.25

WRITE = """(sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        await service.branches.snapshot(CALLER, sandbox.id, 'a', wait=True)"""

CHURN = """(sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        Path({begun!r}).touch()
        for n in range(10_000):
            await service.branches.snapshot(CALLER, sandbox.id, f's{{n}}', wait=n % 2 == 0)
            if n % 3 == 0:
                await service.sandboxes.fork(CALLER, f's{{n}}', 1, ForkOptions())
                await service.chains.compact(CALLER, f's{{n}}', f'flat{{n}}')
                await service.snapshots.delete(CALLER, f'flat{{n}}')"""

LINK = """from forkd.model.ids import parse_tag
        from forkd.model.snapshot import LinkRequest
        async for _ in service.chains.extend(CALLER, LinkRequest(parse_tag('a'), TAG, 'true')):
            pass"""

COMPACT = """await service.chains.compact(CALLER, 'b')"""


async def is_true(host: FakeHost, service: Host) -> None:
    """Check that what the service says is what there is."""
    state = host.settings.state_dir
    for snapshot in await service.snapshots.list(CALLER):
        if snapshot.status is SnapshotStatus.READY:
            for name in ("state", "memory", "disk.layer"):
                read_stored(snapshot.directory / name, name)
        else:
            assert (snapshot.status, snapshot.error) == (SnapshotStatus.FAILED, stored.KILLED)
            assert not snapshot.directory.exists()
    assert list((state / "staging").iterdir()) == []
    assert list(host.settings.zygotes_dir.iterdir()) == []
    sandboxes = await service.sandboxes.list(CALLER)
    assert {each.pid for each in sandboxes} == set(host.vmm_processes())
    for each in sandboxes:
        assert each.state is SandboxState.RUNNING
        assert await value(service, each.id, "answer") == 42
        await service.sandboxes.delete(CALLER, each.id)
    assert freed(host)


def recorded(state: Path) -> bool:
    return (state / "writing" / "a.json").exists()


def staged(state: Path) -> bool:
    return any(state.glob("staging/*"))


def written(state: Path) -> bool:
    return any(state.glob("staging/*/disk.layer"))


def named(state: Path) -> bool:
    return (state / "snapshots" / "a").exists()


@pytest.mark.parametrize("point", [recorded, staged, written, named])
async def test_a_daemon_killed_while_it_writes_leaves_a_whole_snapshot_or_says_that_it_failed(
    fake_host: FakeHost, point: Callable[[Path], bool]
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
    daemon = KillableDaemon(fake_host, WRITE)
    state = fake_host.settings.state_dir
    await daemon.kill_when(lambda: point(state) or named(state))  # a point is soon passed

    async with fake_host.service() as service:
        assert {each.tag for each in await service.snapshots.list(CALLER)} <= {TAG, A}
        await is_true(fake_host, service)


async def test_a_daemon_killed_while_it_makes_a_link_leaves_no_sandbox_that_nobody_asked_for(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="link=wait"))
    daemon = KillableDaemon(fake_host, LINK)
    await daemon.kill_when(lambda: staged(fake_host.settings.state_dir))

    async with fake_host.service() as service:
        assert await service.sandboxes.list(CALLER) == ()
        assert freed(fake_host)


async def test_a_daemon_killed_at_random_points_never_leaves_a_torn_snapshot(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
    chance = random.Random(3)  # noqa: S311 - a test's own dice
    begun = fake_host.folder / "begun"
    for _ in range(ROUNDS):
        daemon = KillableDaemon(fake_host, CHURN.format(begun=str(begun)))
        until_s: list[float] = []

        def due(until_s: list[float] = until_s, wait_s: float = chance.random()) -> bool:
            if begun.exists() and not until_s:
                until_s.append(time.monotonic() + wait_s * KILL_WITHIN_S)
            return bool(until_s) and time.monotonic() > until_s[0]

        await daemon.kill_when(due)
        begun.unlink()
        async with fake_host.service() as service:
            await is_true(fake_host, service)
            for snapshot in await service.snapshots.list(CALLER):
                if snapshot.tag != TAG:
                    await service.snapshots.delete(CALLER, snapshot.tag)


@pytest.mark.parametrize(
    "point",
    [staged, written, lambda state: any(state.glob("staging/replaced-*"))],
    ids=["staged", "written", "replaced"],
)
async def test_a_daemon_killed_while_it_compacts_leaves_the_old_snapshot_or_the_new_one(
    fake_host: FakeHost, point: Callable[[Path], bool]
) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)
    done = fake_host.settings.state_dir / "snapshots" / B / "manifest.json"

    def compacted() -> bool:
        try:
            return json.loads(done.read_text())["parent"] is None
        except FileNotFoundError:
            return True

    daemon = KillableDaemon(fake_host, COMPACT)
    await daemon.kill_when(lambda: point(fake_host.settings.state_dir) or compacted())

    async with fake_host.service() as service:
        assert (await service.snapshots.get(CALLER, B)).depth in {0, 2}
        async with forked(service, C) as sandbox:
            assert await value(service, sandbox.id, "(answer, a, b, c)") == [42, 1, 1, 1]
        assert list((fake_host.settings.state_dir / "staging").iterdir()) == []


async def test_a_seed_that_is_killed_while_it_writes_is_one_error_and_leaves_nothing(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="link=die"))
        async with forked(service) as source:
            with pytest.raises(EngineError):
                await service.branches.snapshot(CALLER, source.id, A, wait=True)
            assert await value(service, source.id, "answer") == 42
        assert [each.tag for each in await service.snapshots.list(CALLER)] == [TAG]
        assert fake_host.left_over() == []


async def test_a_source_that_is_killed_leaves_its_snapshot_whole(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="link=wait"))
        (source,) = (await service.sandboxes.fork(CALLER, TAG, 1, ONE)).sandboxes
        await service.branches.snapshot(CALLER, source.id, A, wait=False)
        assert source.pid is not None
        os.kill(source.pid, signal.SIGKILL)
        (fake_host.settings.state_dir / "go").touch()

        async with forked(service, A) as sibling:
            assert await value(service, sibling.id, "answer") == 42
        await service.sandboxes.delete(CALLER, source.id)
        await add_link(service, B, A)
        assert (await service.snapshots.get(CALLER, parse_tag("b"))).depth == 2
