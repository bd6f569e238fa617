"""A process that was taken over, in the very jail of machines, of zygotes and of seeds.

Without the filter of system calls, which would end it at its first try: what is refused here is
refused by the jail alone.  What each gets at is in `support/captives.py`, and so in
captive-tries.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd import programs
from forkd.engine.configs import BranchConfig, ChildConfig, Identity, ZygoteConfig
from forkd.engine.control import Control
from forkd.engine.process import CONTROL_SOCKET, ZYGOTE_SOCKET, end, end_listener, start_zygote
from forkd.engine.replies import ChildFailed, ChildReady
from forkd.host import cgroupfs, ownership, userns
from forkd.host.gates import Gates
from forkd.model.ids import parse_tag
from forkd.model.sandbox import ForkOptions
from forkd.service.chain_files import load_chain
from forkd.service.jail import Jail
from forkd.service.zygotes import DerivedUsers, derived
from forkd.store.snapshots import SnapshotStore
from tests.support import captives
from tests.support.callers import CALLER
from tests.support.captives import ABOVE
from tests.support.real_host import FORK_DEADLINE_S, REAL, TAG, real_host, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import Tag
    from forkd.model.sandbox import Sandbox
    from forkd.service.chain_files import LinkFiles
    from forkd.service.jail import Part
    from tests.support.real_host import RealHost

__all__ = ["real_host"]

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
CAPTIVE = ROOT / "build/bin/forkd-captive"
NAME, SEED = "captive", "captive-seed"
HONEST = "honest"


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(real_host: RealHost) -> AsyncIterator[Sandbox]:
    async with real_host.forked(1, ForkOptions()) as (forked,):
        yield forked


@dataclass
class Beside:
    """A zygote of the captive's program, in a jail as that of the host's own, beside it.

    Attributes:
        host: The host.
        base: What the zygote holds.
        jail: Whose users its forks are; it has none of the host's.
        part: Those of the zygote.
        pid: Its process.
        control: A connection to it.
        stack: Takes back what is made with it.
    """

    host: RealHost
    base: LinkFiles
    jail: Jail
    part: Part
    pid: int
    control: Control
    stack: contextlib.AsyncExitStack

    def child(self, name: str, hostname: str, uid: int | None = None) -> ChildConfig:
        """Return a child with a folder of its own, if need be as a user of the zygote's."""
        uid = self.jail.take(self.part) if uid is None else uid
        assert uid is not None
        folder = folder_of(self.stack, self.host.settings.sandboxes_dir / name, uid)
        return ChildConfig(name, folder, told(hostname), uid=uid)


def folder_of(stack: contextlib.AsyncExitStack, folder: Path, uid: int) -> Path:
    """Make a folder that is a user's, until the stack is left."""
    folder.mkdir(mode=0o700)
    stack.callback(shutil.rmtree, folder)
    ownership.give(folder, uid)
    return folder


def told(hostname: str) -> Identity:
    """Return an identity; a captive has what it is to try for a hostname."""
    return Identity(hostname, "0" * 32, "00000000-0000-4000-8000-000000000000")


def others(sandbox: str, uid: int | None, zygote: str) -> str:
    """Return the hostname of a captive that tries a sandbox, which is a user's, and a zygote."""
    return f"{sandbox}:{zygote}:{uid}"


@contextlib.asynccontextmanager
async def beside(host: RealHost) -> AsyncIterator[Beside]:
    """Have such a zygote."""
    settings = host.settings
    jail = Jail(
        settings.uids, settings.jail_dirs, settings.tops_dir, cgroups=host.names.cgroup_root
    )
    for parent in (settings.zygotes_dir, settings.sandboxes_dir):
        for each in parent.iterdir():
            jail.hold(jail.owner(each))
    part = jail.take_part()
    assert part is not None
    base = load_chain(SnapshotStore(settings.state_dir), TAG)[-1]
    async with contextlib.AsyncExitStack() as stack:
        folder = folder_of(stack, settings.zygotes_dir / NAME, part.uid)
        told = jail.zygote_config(part)
        config = ZygoteConfig(folder, base.state, (base.memory,), base.disk, told)
        process = stack.enter_context(await start_zygote(CAPTIVE, config, filtered=False))
        stack.push_async_callback(end, process)
        control = await stack.enter_async_context(await Control.connect(folder / ZYGOTE_SOCKET))
        yield Beside(host, base, jail, part, process.pid, control, stack)


async def fork_one(
    zygote: Control, child: ChildConfig, users: str | None = None
) -> ChildReady | ChildFailed:
    said: list[ChildReady | ChildFailed] = []
    await zygote.fork([child], deadline_s=FORK_DEADLINE_S, on_outcome=said.append, users=users)
    (outcome,) = said
    return outcome


async def honest(
    made: Beside, zygote: Control, child: ChildConfig, users: str | None = None
) -> int:
    """Fork a child that is no captive, which ends with the zygote; return its process."""
    ready = await fork_one(zygote, child, users)
    assert isinstance(ready, ChildReady), ready
    made.stack.push_async_callback(end_listener, child.directory / CONTROL_SOCKET)
    return ready.pid


async def check(place: str, zygote: Control, child: ChildConfig) -> None:
    """Make sure that a captive gets what captive-tries.md says of its place, and nothing else."""
    outcome = await fork_one(zygote, child)
    assert isinstance(outcome, ChildFailed)
    assert "a captive ran" in outcome.message, outcome
    report = child.directory / "captive.json"
    tries: list[dict[str, str]] = json.loads(await asyncio.to_thread(report.read_text))
    report.unlink()  # the next captive there may be another user
    assert {(each["group"], each["try"]) for each in tries} == captives.tries()
    got = {(each["group"], each["try"]): each["got"] for each in tries if "got" in each}
    assert set(got) == captives.got(place), got


async def hosts_own(host: RealHost, sandbox: Sandbox) -> str:
    """Return the hostname of a captive that tries the host's own sandbox and zygote."""
    folders = await asyncio.to_thread(lambda: list(host.settings.zygotes_dir.iterdir()))
    zygote = next(each.name for each in folders if not each.name.startswith(NAME))
    uid = (host.settings.sandboxes_dir / sandbox.id).stat().st_uid
    return others(sandbox.id, uid, zygote)


@contextlib.asynccontextmanager
async def derived_of(made: Beside, tag: Tag) -> AsyncIterator[Control]:
    """Have a zygote of a delta that is derived from one, with users of its own."""
    settings, stack = made.host.settings, made.stack
    delta = load_chain(SnapshotStore(settings.state_dir), tag)[-1]
    part = made.jail.derive_part(made.part)
    users = made.jail.users_of(part)
    namespace = userns.make(programs.find(programs.VMM), made.pid, made.part.uid, users)
    assert namespace is not None
    stack.callback(os.close, namespace)
    folder = folder_of(stack, settings.zygotes_dir / f"{NAME}-derived", part.uid)
    own = DerivedUsers(namespace, part.uid)
    stack.enter_context(await derived(made.control, folder, delta, own))
    made.part = part
    async with await Control.connect(folder / ZYGOTE_SOCKET) as control:
        yield control
        await control.stop()


@contextlib.asynccontextmanager
async def seed_of(made: Beside, source: ChildConfig) -> AsyncIterator[tuple[Control, ChildConfig]]:
    """Have a machine with a seed, in a user namespace and with a gate as the daemon gives them.

    With the seed's connection there is a child whose cgroup is behind the gate.
    """
    stack, settings = made.stack, made.host.settings
    assert source.uid is not None
    pid = await honest(made, made.control, source)
    folder = folder_of(stack, settings.zygotes_dir / SEED, source.uid)
    async with await Control.connect(source.directory / CONTROL_SOCKET) as machine:
        await machine.branch(BranchConfig(folder))
    stack.push_async_callback(end_listener, folder / ZYGOTE_SOCKET)
    block = made.jail.take_block(2, made.part)
    namespace = userns.make(programs.find(programs.VMM), pid, source.uid, [block])
    assert namespace is not None
    stack.callback(os.close, namespace)
    cgroup = made.host.names.cgroup_root / NAME
    cgroupfs.make(cgroup)
    stack.callback(cgroupfs.end, cgroup, FORK_DEADLINE_S)
    uids = {source.uid, *(made.jail.take_of([block]) for _ in range(2))}
    gates = stack.enter_context(Gates(uids))
    await stack.enter_async_context(gates.served())
    gate = gates.add(cgroup)
    stack.callback(os.close, gate)
    one, other = sorted(uids - {source.uid})
    async with await Control.connect(folder / ZYGOTE_SOCKET) as control:
        await control.hand({"users": namespace, str(cgroup): gate})
        sibling = made.child(f"{NAME}-sibling", HONEST, other)
        await honest(made, control, sibling, "users")
        yield control, made.child(f"{NAME}-one", "", one)


def programs_with(word: bytes) -> set[str]:
    return {each.name for each in CAPTIVE.parent.iterdir() if word in each.read_bytes()}


async def test_what_a_captured_machine_and_its_zygote_get_is_said_and_nothing_else(
    real_host: RealHost, sandbox: Sandbox
) -> None:
    async with beside(real_host) as made:
        whose = await hosts_own(real_host, sandbox)
        child = made.child(f"{NAME}-one", "")
        for place, above in (("machine", ""), ("zygote", ABOVE)):
            await check(place, made.control, replace(child, identity=told(f"{above}{whose}")))

    assert await value(real_host, sandbox.id, "1 + 1") == 2


@pytest.mark.soak(only=True)
async def test_what_a_captured_zygote_of_a_delta_gets_is_said_and_nothing_else(
    real_host: RealHost, sandbox: Sandbox
) -> None:
    tag = parse_tag("taken")
    await real_host.service.branches.snapshot(CALLER, sandbox.id, tag, wait=True)
    async with beside(real_host) as made:
        other = made.child(f"{NAME}-other", HONEST)
        await honest(made, made.control, other)
        async with derived_of(made, tag) as zygote:
            whose = others(other.id, other.uid, NAME)
            await check("derived zygote", zygote, made.child(f"{NAME}-one", f"{ABOVE}{whose}"))


@pytest.mark.soak(only=True)
async def test_what_a_captured_sibling_and_its_seed_get_is_said_and_nothing_else(
    real_host: RealHost, sandbox: Sandbox
) -> None:
    async with beside(real_host) as made:
        source = made.child(f"{NAME}-source", HONEST)
        async with seed_of(made, source) as (seed, child):
            assert child.uid is not None
            for place, whose in (
                ("seed", f"{ABOVE}{await hosts_own(real_host, sandbox)}"),
                ("sibling", others(source.id, source.uid, SEED)),
                ("sibling", others(f"{NAME}-sibling", child.uid + 1, SEED)),
            ):
                await check(place, seed, replace(child, identity=told(whose)))


async def test_no_program_that_is_shipped_has_a_captive_in_it() -> None:
    assert programs_with(b"captive.json") == {CAPTIVE.name}
