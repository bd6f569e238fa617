"""Sandboxes of a VMM whose program was replaced on the disk, as an upgrade does, are adopted."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.engine.control import Control
from forkd.engine.process import CONTROL_SOCKET
from forkd.errors import EngineError
from forkd.host import proc
from forkd.model.ids import parse_tag
from forkd.model.sandbox import BranchOptions, ForkOptions, SandboxState
from forkd.service.host import open_host
from tests.support.callers import CALLER
from tests.support.host_settings import settings_in
from tests.support.real_host import (
    FORK_DEADLINE_S,
    REAL,
    RECIPE,
    TAG,
    RealHost,
    fresh_folders,
    names_of,
    shell,
    value,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.sandbox import Sandbox
    from tests.support.bakes import Bakes

pytestmark = [REAL, pytest.mark.soak(only=True), pytest.mark.timeout(900)]

NOTED = parse_tag("noted")
OPTIONS = ForkOptions(deadline_s=FORK_DEADLINE_S)


@asynccontextmanager
async def host_of(bakes: Bakes) -> AsyncIterator[RealHost]:
    """A host whose VMM is a copy of its own, which a test may replace."""
    folders = fresh_folders()
    try:
        (await asyncio.to_thread(bakes.of, RECIPE)).copy_to(folders[0])
        made = settings_in(*folders)
        settings = replace(made, vmm=Path(shutil.copy2(made.vmm, folders[0] / "forkd-vmm")))
        async with AsyncExitStack() as opened:
            names = names_of(settings)
            service = await opened.enter_async_context(open_host(settings))
            snapshot = await service.snapshots.get(CALLER, TAG)
            yield RealHost(settings, service, snapshot, opened, names)
    finally:
        for folder in folders:
            shutil.rmtree(folder)


def upgrade(vmm: Path) -> None:
    """Put another program in the place of a VMM's, as package managers do."""
    other = vmm.with_suffix(".new")
    shutil.copy2(vmm, other)
    with other.open("ab") as file:
        file.write(b"another")
    other.rename(vmm)


def program_of(sandbox: Sandbox) -> str:
    """Return what the kernel says that a sandbox's process executes."""
    return str(Path(f"/proc/{sandbox.pid}/exe").readlink())


async def fork(host: RealHost, tag: str) -> Sandbox:
    result = await host.service.sandboxes.fork(CALLER, parse_tag(tag), 1, OPTIONS)
    assert result.failures == ()
    return result.sandboxes[0]


async def test_a_sandbox_lives_on_when_its_vmm_is_replaced(bakes: Bakes) -> None:
    async with host_of(bakes) as host:
        vmm, service = host.settings.vmm, host.service
        old = await fork(host, TAG)
        await value(host, old.id, "mark = 5")

        upgrade(vmm)
        await host.restart(warm=False)
        service = host.service

        (adopted,) = await service.sandboxes.list(CALLER)
        assert (adopted.id, adopted.pid) == (old.id, old.pid)
        assert adopted.state is SandboxState.RUNNING
        assert program_of(adopted) == f"{vmm} (deleted)"
        assert await shell(host, old.id, "echo hello") == "hello\n"
        assert await value(host, old.id, "mark") == 5

        # All of this is its old program's; only what is forked of a snapshot is the new one's.
        branch = await service.branches.branch(
            CALLER, old.id, 1, BranchOptions(deadline_s=FORK_DEADLINE_S)
        )
        (sibling,) = branch.fork.sandboxes
        assert program_of(sibling) == f"{vmm} (deleted)"
        assert await value(host, sibling.id, "mark") == 5
        await service.branches.snapshot(CALLER, old.id, NOTED, wait=True)
        await value(host, old.id, "mark = 6")
        await service.sandboxes.reset(CALLER, old.id, deadline_s=FORK_DEADLINE_S)
        assert await value(host, old.id, "'mark' in globals()") is False

        control_socket = host.settings.sandboxes_dir / adopted.id / CONTROL_SOCKET
        async with await Control.connect(control_socket) as control:
            with pytest.raises(EngineError, match="by an earlier forkd, whose VMM cannot do this"):
                await control.request("an operation of the future")

        new = await fork(host, NOTED)
        assert program_of(new) == str(vmm)
        assert await value(host, new.id, "mark") == 5

        pids = {each.pid for each in (old, sibling, new) if each.pid is not None}
        for each in (old, sibling, new):
            await service.sandboxes.delete(CALLER, each.id)
        assert not pids & set(proc.processes())
