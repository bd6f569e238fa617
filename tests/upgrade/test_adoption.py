"""The daemon of today adopts what daemons of every earlier version left running.

Each folder of `golden/` is such a state, with a README that says how it came to be.  Its machines
are started anew, as processes of the fake VMM in the folders that its rows name.  What is adopted
is the database and the folders: states of machines are of today's version, since those of before
version 2 are refused by name (`test_snapshots_of_an_earlier_format_are_refused_by_name`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.engine.configs import MachineConfig
from forkd.engine.process import start_machine
from forkd.errors import StoreError
from forkd.host.files import make_folder
from forkd.model.caller import DEFAULT_OWNER
from forkd.model.ids import SandboxId, Tag
from forkd.model.network import HOST
from forkd.model.sandbox import BranchOptions, ForkOptions, SandboxState
from forkd.model.snapshot import SnapshotStatus
from forkd.service.host import DATABASE_FILE
from forkd.store.schema import SCHEMA_VERSION
from tests.support.callers import CALLER
from tests.support.stored import read_stored, write_stored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.host.spawn import Process
    from tests.support.service_host import FakeHost

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(folder.name for folder in GOLDEN.iterdir())


@contextlib.asynccontextmanager
async def left_behind(
    host: FakeHost, version: str, *, readable: bool = True
) -> AsyncIterator[dict[str, str]]:
    """Lay out what an earlier daemon left, its machines running; gives who is who.

    Args:
        host: Where.
        version: Of the daemon.
        readable: Write the states of its machines in today's version.
    """
    state, run_dir = host.settings.state_dir, host.settings.run_dir
    shutil.copytree(GOLDEN / version, state)
    for path in state.glob("snapshots/*/state") if readable else ():
        write_stored(path, "state", read_stored(path, "state"))
    lease = "place" if version == "schema-2" else "lease"
    with contextlib.closing(sqlite3.connect(state / DATABASE_FILE)) as database:
        query = f"SELECT id, {lease} FROM sandboxes WHERE state = 'running'"  # noqa: S608 - ours
        machines = [
            (id_, await a_machine(host, run_dir / "s" / place))
            for id_, place in database.execute(query).fetchall()
        ]
        for id_, process in machines:
            database.execute("UPDATE sandboxes SET pid = ? WHERE id = ?", (process.pid, id_))
        database.commit()
    names: dict[str, str] = json.loads((state / "names.json").read_text())
    try:
        yield names
    finally:
        for _, process in machines:
            with process:
                process.kill()
                await process.wait(10)


async def a_machine(host: FakeHost, folder: Path) -> Process:
    make_folder(folder, parents=True)
    config = MachineConfig(folder, Path("/k"), vcpus=1, memory_bytes=1 << 27, cmdline="boot=never")
    return await start_machine(host.settings.vmm, config)


@pytest.mark.parametrize("version", VERSIONS)
async def test_everything_that_ran_is_adopted_and_can_be_used(
    fake_host: FakeHost, version: str
) -> None:
    async with left_behind(fake_host, version) as names, fake_host.service() as service:
        found = {each.id: each for each in await service.sandboxes.list(CALLER)}
        running = {id_ for id_, each in found.items() if each.state is SandboxState.RUNNING}

        assert found.keys() - running == {names["exited"]}
        assert not found.keys() & set(names["dropped"])
        assert {*names["siblings"], names["promoted"], names["renaming"]} < running
        assert {each.owner for each in found.values()} == {DEFAULT_OWNER}
        assert found[SandboxId(names["grandchild"])].root == names["source"]
        for id_ in running:
            assert (await service.guests.eval(CALLER, id_, "1 + 1")).value == 2
        (sibling,) = (
            await service.branches.branch(
                CALLER, SandboxId(names["source"]), 1, BranchOptions(), tag=Tag("new")
            )
        ).fork.sandboxes
        assert sibling.ancestors == (names["source"],)
        await service.sandboxes.delete_all([*running, sibling.id])
        assert [each.id for each in await service.sandboxes.list(CALLER)] == [names["exited"]]


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_promotion_that_was_interrupted_is_finished(
    fake_host: FakeHost, version: str
) -> None:
    async with left_behind(fake_host, version) as names, fake_host.service() as service:
        promoted = service.sandboxes.roster.get(CALLER, SandboxId(names["renaming"]))
        async with asyncio.timeout(10):
            while promoted.renaming:  # noqa: ASYNC110 - finished by a task of its own
                await asyncio.sleep(0.001)

        told = await service.guests.eval(CALLER, promoted.sandbox.id, "(identity['id'], renamed)")
        assert told.value == [names["renaming"], 1]
        await service.sandboxes.delete_all(each.id for each in service.sandboxes.roster.all())


@pytest.mark.parametrize("version", VERSIONS)
async def test_its_snapshots_are_forked_and_its_addresses_given_to_nobody_else(
    fake_host: FakeHost, version: str
) -> None:
    async with left_behind(fake_host, version) as names, fake_host.service() as service:
        snapshots = await service.snapshots.list(CALLER)
        assert {each.tag: each.depth for each in snapshots} == {"python": 0, "delta": 1}
        assert {each.status for each in snapshots} == {SnapshotStatus.READY}
        assert {each.owner for each in snapshots} == {DEFAULT_OWNER}
        result = await service.sandboxes.fork(CALLER, Tag("delta"), 2, ForkOptions())
        assert result.failures == ()

        networked = service.sandboxes.roster.get(CALLER, SandboxId(names["networked"]))
        slot = networked.lease.slot
        assert slot is not None
        assert (slot.index, slot.tap, slot.guest) == (5, "fk0007", networked.sandbox.address)
        leases = service.sandboxes.leases.reserve([SandboxId(f"sb-{n}") for n in range(7)], HOST)
        assert [each.slot.index for each in leases if each.slot] == [0, 1, 2, 3, 4, 6, 8]
        await service.sandboxes.delete_all(each.id for each in service.sandboxes.roster.all())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_golden_database_has_the_version_that_its_folder_names(version: str) -> None:
    with contextlib.closing(sqlite3.connect(GOLDEN / version / DATABASE_FILE)) as database:
        (found,) = database.execute("PRAGMA user_version").fetchone()

    assert f"schema-{found}" == version
    assert found < SCHEMA_VERSION


@pytest.mark.parametrize("version", VERSIONS)
async def test_snapshots_of_an_earlier_format_are_refused_by_name(
    fake_host: FakeHost, version: str
) -> None:
    refused = "snapshot python cannot be used: state is too old: .* bake the snapshot again"
    async with left_behind(fake_host, version, readable=False), fake_host.service() as service:
        with pytest.raises(StoreError, match=refused):
            await service.sandboxes.fork(CALLER, Tag("python"), 1, ForkOptions())

        for sandbox in await service.sandboxes.list(CALLER):
            await service.sandboxes.delete(CALLER, sandbox.id)
