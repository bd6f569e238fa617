"""A machine that was taken over, in the very jail of machines: it gets at nothing.

Without the filter of system calls, which would end it at its first try: what is refused here is
refused by the jail alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd import programs
from forkd.engine.configs import BranchConfig, ChildConfig, Identity, ZygoteConfig
from forkd.engine.control import Control
from forkd.engine.process import CONTROL_SOCKET, ZYGOTE_SOCKET, end, end_listener, start_zygote
from forkd.engine.replies import ChildFailed, ChildReady
from forkd.host import ownership, userns
from forkd.model.sandbox import ForkOptions
from forkd.service.chain_files import load_chain
from forkd.service.jail import Jail
from forkd.store.snapshots import SnapshotStore
from tests.support.docs import tries_in
from tests.support.real_host import FORK_DEADLINE_S, REAL, TAG, real_host, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.sandbox import Sandbox
    from tests.support.real_host import RealHost

__all__ = ["real_host"]

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
CAPTIVE = ROOT / "build/bin/forkd-captive"
TRIES_LEAST = 60
NAME = "captive"
HONEST = "honest"


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(real_host: RealHost) -> AsyncIterator[Sandbox]:
    async with real_host.forked(1, ForkOptions()) as (forked,):
        yield forked


async def captured(host: RealHost, sibling: Sandbox) -> list[dict[str, str]]:
    """Have a machine that was taken over try what it can; return what came of each try."""
    settings = host.settings
    assert settings.uids is not None
    seen = settings.jail_dirs, settings.jail_read_only_dirs
    jail = Jail(settings.uids, *seen, settings.tops_dir)
    (base,) = load_chain(SnapshotStore(settings.state_dir), TAG)
    zygote_folder, folder = settings.zygotes_dir / NAME, settings.sandboxes_dir / NAME
    uid = settings.uids.first + settings.uids.count - 1
    for each in (zygote_folder, folder):
        each.mkdir(mode=0o700)
    ownership.give(folder, uid)
    said: list[ChildReady | ChildFailed] = []
    try:
        config = ZygoteConfig(zygote_folder, base.state, (base.memory,), base.disk, jail.config())
        with await start_zygote(CAPTIVE, config, filtered=False) as process:
            async with await Control.connect(zygote_folder / "zygote.sock") as control:
                child = ChildConfig(NAME, folder, told(f"{sibling.id}:{NAME}"), uid=uid)
                await control.fork([child], deadline_s=FORK_DEADLINE_S, on_outcome=said.append)
            await end(process)
        (outcome,) = said
        assert isinstance(outcome, ChildFailed)
        assert "a captive ran" in outcome.message, outcome
        report = await asyncio.to_thread((folder / "captive.json").read_text)
        found: list[dict[str, str]] = json.loads(report)
        return found
    finally:
        for each in (zygote_folder, folder):
            shutil.rmtree(each)


def told(hostname: str) -> Identity:
    """Return an identity; a captive has the names of the folders that it tries for a hostname."""
    return Identity(hostname, "0" * 32, "00000000-0000-4000-8000-000000000000")


@dataclass
class Family:
    """A machine, a seed of it, and a sibling of it, of a zygote whose other forks are captives.

    Attributes:
        users: Of the machine, of its sibling, and two more.
        names: What their folders are called, in this order.
        seed: What the seed's folder is called.
        zygote: A connection to the seed, which is in the user namespace of the last three.
    """

    folder: Path
    users: tuple[int, ...]
    names: tuple[str, ...]
    seed: str
    zygote: Control

    async def fork(self, index: int, hostname: str) -> ChildReady | ChildFailed:
        """Fork one of them."""
        return await fork_one(self.zygote, self.child(index, hostname))

    def child(self, index: int, hostname: str) -> ChildConfig:
        name = self.names[index]
        return ChildConfig(name, self.folder / name, told(hostname), uid=self.users[index])


async def fork_one(
    zygote: Control, child: ChildConfig, users: str | None = None
) -> ChildReady | ChildFailed:
    said: list[ChildReady | ChildFailed] = []
    await zygote.fork([child], deadline_s=FORK_DEADLINE_S, on_outcome=said.append, users=users)
    (outcome,) = said
    return outcome


@contextlib.asynccontextmanager
async def family(host: RealHost) -> AsyncIterator[Family]:
    """Have a machine with a seed and an honest sibling, and users for two captives."""
    settings = host.settings
    assert settings.uids is not None
    seen = settings.jail_dirs, settings.jail_read_only_dirs
    jail = Jail(settings.uids, *seen, settings.tops_dir)
    (base,) = load_chain(SnapshotStore(settings.state_dir), TAG)
    names = tuple(f"{NAME}-{each}" for each in ("source", "sibling", "one", "two"))
    first = settings.uids.first + settings.uids.count - 3
    uids = (settings.uids.siblings_first - 1, first, first + 1, first + 2)
    of_zygote, of_seed = settings.zygotes_dir / NAME, settings.zygotes_dir / f"{NAME}-seed"
    folders = [settings.sandboxes_dir / name for name in names]
    for each in (of_zygote, of_seed, *folders):
        each.mkdir(mode=0o700)
    for each, uid in zip((of_seed, *folders), (uids[0], *uids), strict=True):
        ownership.give(each, uid)
    async with contextlib.AsyncExitStack() as stack:
        for each in (of_zygote, of_seed, *folders):
            stack.callback(shutil.rmtree, each)
        config = ZygoteConfig(of_zygote, base.state, (base.memory,), base.disk, jail.config())
        process = stack.enter_context(await start_zygote(CAPTIVE, config, filtered=False))
        stack.push_async_callback(end, process)
        zygote = await stack.enter_async_context(await Control.connect(of_zygote / ZYGOTE_SOCKET))
        source = ChildConfig(names[0], folders[0], told(HONEST), uid=uids[0])
        ready = await fork_one(zygote, source)
        assert isinstance(ready, ChildReady), ready
        stack.push_async_callback(end_listener, folders[0] / CONTROL_SOCKET)
        async with await Control.connect(folders[0] / CONTROL_SOCKET) as machine:
            await machine.branch(BranchConfig(of_seed))
        stack.push_async_callback(end_listener, of_seed / ZYGOTE_SOCKET)
        vmm = programs.find(programs.VMM)
        users = userns.make(vmm, ready.pid, uids[0], [(first, 3)])
        assert users is not None
        stack.callback(os.close, users)
        seed = await stack.enter_async_context(await Control.connect(of_seed / ZYGOTE_SOCKET))
        await seed.hand({"users": users})
        made = Family(settings.sandboxes_dir, uids, names, of_seed.name, seed)
        sibling = await fork_one(seed, made.child(1, HONEST), "users")
        assert isinstance(sibling, ChildReady), sibling
        stack.push_async_callback(end_listener, folders[1] / CONTROL_SOCKET)
        yield made


def programs_with(word: bytes) -> set[str]:
    return {each.name for each in CAPTIVE.parent.iterdir() if word in each.read_bytes()}


async def test_a_captured_machine_is_refused_everything(
    real_host: RealHost, sandbox: Sandbox
) -> None:
    tries = await captured(real_host, sandbox)

    assert [each for each in tries if "refused" not in each] == []
    assert len(tries) >= TRIES_LEAST
    told = tries_in("What a captured machine was refused")
    assert {(each["group"], each["try"]) for each in tries} == told
    assert await value(real_host, sandbox.id, "1 + 1") == 2


async def test_a_captured_sibling_gets_at_nothing_of_its_source_its_sibling_or_their_seed(
    real_host: RealHost,
) -> None:
    async with family(real_host) as found:
        for index, whose in ((2, found.names[0]), (3, found.names[1])):
            outcome = await found.fork(index, f"{whose}:{found.seed}")

            assert isinstance(outcome, ChildFailed)
            assert "a captive ran" in outcome.message, outcome
            report = (found.folder / found.names[index] / "captive.json").read_text()
            tries: list[dict[str, str]] = json.loads(report)
            assert [each for each in tries if "refused" not in each] == []
            assert {(each["group"], each["try"]) for each in tries} == tries_in(
                "What a captured machine was refused"
            )


async def test_no_program_that_is_shipped_has_a_captive_in_it() -> None:
    assert programs_with(b"captive.json") == {CAPTIVE.name}
