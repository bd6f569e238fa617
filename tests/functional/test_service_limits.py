"""Every sandbox has limits, and one that exceeds its own ends alone and says why."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from forkd.cgroups.limits import CPU_PERIOD_US
from forkd.errors import Conflict, ForkdError
from forkd.host.disks import disk_of
from forkd.limits import PIDS_LIMIT_DEFAULT, VMM_CPUS, VMM_MEMORY_MIB, VMM_MEMORY_SHARE
from forkd.model.event import EventKind
from forkd.model.sandbox import BranchOptions, ForkOptions, NewLimits, SandboxState
from tests.support.callers import CALLER
from tests.support.events import next_of
from tests.support.memory import TAKE_BACK
from tests.support.real_host import REAL, shell, value

if TYPE_CHECKING:
    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

DEADLINE_S = 60.0

LIMIT_MIB = 256
"""Less than the guest has, and more than a fork of it takes."""

REASON = "killed, out of memory: its own limit had no more"

WRITTEN_BYTES = 4 << 20

WRITE = "dd if=/dev/zero of=/root/written bs=64k count=64 conv=fsync 2>&1"
"""Four MiB, until they are on the disk."""

WRITTEN_AT_LEAST_S = 2.0
"""How long that takes at 1 MiB/s, of which a second's worth may go at once."""

HOLD = """
import numpy
def hold(mib, byte):
    '''Have so much memory filled with a byte.'''
    global held
    held = numpy.full(mib << 20, byte, dtype=numpy.uint8)
    return int(held[-1])
def overwrite(byte):
    held[:] = byte
    return int(held[-1])
1
"""


async def test_a_sandbox_that_asks_for_nothing_has_limits_of_its_snapshot(
    real_host: RealHost,
) -> None:
    snapshot = real_host.snapshot
    guest_mib = snapshot.memory_bytes >> 20
    limit_mib = guest_mib + guest_mib // VMM_MEMORY_SHARE + VMM_MEMORY_MIB
    async with real_host.forked(1, ForkOptions()) as (sandbox,):
        group = real_host.names.cgroup_root / sandbox.id

        quota_us = int((snapshot.vcpus + VMM_CPUS) * CPU_PERIOD_US)
        assert (group / "memory.max").read_text().strip() == str(limit_mib << 20)
        assert (group / "memory.swap.max").read_text().strip() == "0"
        assert (group / "cpu.max").read_text().split() == [str(quota_us), str(CPU_PERIOD_US)]
        assert (group / "pids.max").read_text().strip() == str(PIDS_LIMIT_DEFAULT)
        assert str(sandbox.pid) in (group / "cgroup.procs").read_text().split()
        assert sandbox.memory_limit_mib == limit_mib
        assert (sandbox.cpu_limit, sandbox.pids_limit) == (
            snapshot.vcpus + VMM_CPUS,
            PIDS_LIMIT_DEFAULT,
        )

    assert not group.exists()


async def test_a_guest_that_takes_all_its_memory_stays_within_its_limits(
    real_host: RealHost,
) -> None:
    async with real_host.forked(1, ForkOptions()) as (sandbox,):
        await value(real_host, sandbox.id, HOLD)
        free = (
            "int([l for l in open('/proc/meminfo') if 'MemAvailable' in l][0].split()[1]) // 1024"
        )
        free_mib = await value(real_host, sandbox.id, free)

        assert await value(real_host, sandbox.id, f"hold({free_mib - 32}, 7)") == 7


async def test_a_guest_past_its_limit_ends_alone_and_says_why(real_host: RealHost) -> None:
    service = real_host.service
    small = ForkOptions(memory_limit_mib=LIMIT_MIB)
    async with (
        real_host.forked(1, small) as (hungry,),
        real_host.forked(1, ForkOptions()) as (quiet,),
    ):
        await shell(real_host, hungry.id, TAKE_BACK)
        await value(real_host, hungry.id, HOLD)
        with pytest.raises(ForkdError):
            await value(real_host, hungry.id, f"hold({LIMIT_MIB + 64}, 1)")
        async with asyncio.timeout(DEADLINE_S):
            async for _ in service.sandboxes.follow_console_log(CALLER, hungry.id):
                pass

        found = await service.sandboxes.get(CALLER, hungry.id)
        assert (found.state, found.exit_reason) == (SandboxState.EXITED, REASON)
        assert await value(real_host, quiet.id, "1 + 1") == 2

    # The sandbox is deleted now, and its history still says why it ended.
    event = await next_of(service, EventKind.SANDBOX_EXITED)
    assert (event.subject, event.detail["reason"]) == (hungry.id, REASON)


@pytest.mark.soak(only=True)
async def test_limits_change_while_a_sandbox_runs_and_outlive_the_daemon(
    real_host: RealHost,
) -> None:
    async with real_host.forked(1, ForkOptions(memory_limit_mib=LIMIT_MIB)) as (sandbox,):
        group = real_host.names.cgroup_root / sandbox.id
        more = NewLimits(
            memory_limit_mib=LIMIT_MIB * 2, cpu_limit=0.5, cpu_weight=50, pids_limit=100
        )
        await real_host.service.sandboxes.set_limits(CALLER, sandbox.id, more)

        assert (group / "memory.max").read_text().strip() == str(LIMIT_MIB * 2 << 20)
        assert (group / "cpu.max").read_text().split() == [str(CPU_PERIOD_US // 2), "100000"]
        assert (group / "pids.max").read_text().strip() == "100"
        assert (group / "cpu.weight").read_text().strip() == "50"
        await value(real_host, sandbox.id, HOLD + f"\nhold({LIMIT_MIB}, 3)")
        less = NewLimits(memory_limit_mib=LIMIT_MIB // 2)
        with pytest.raises(Conflict, match="MiB in use"):
            await real_host.service.sandboxes.set_limits(CALLER, sandbox.id, less)

        await real_host.restart()
        found = await real_host.service.sandboxes.get(CALLER, sandbox.id)
        assert (found.memory_limit_mib, found.cpu_limit) == (LIMIT_MIB * 2, 0.5)
        assert found.cpu_weight == 50
        assert await value(real_host, sandbox.id, "int(held[-1])") == 3


@pytest.mark.soak(only=True)
async def test_what_a_seed_keeps_of_its_source_does_not_end_the_source(
    real_host: RealHost,
) -> None:
    service = real_host.service
    small = ForkOptions(memory_limit_mib=LIMIT_MIB)
    mib = LIMIT_MIB * 3 // 5
    async with real_host.forked(1, small) as (source,):
        await shell(real_host, source.id, TAKE_BACK)
        await value(real_host, source.id, HOLD + f"\nhold({mib}, 1)")
        branched = await service.branches.branch(CALLER, source.id, 1, BranchOptions())
        (sibling,) = branched.fork.sandboxes

        assert await value(real_host, source.id, "overwrite(2)") == 2
        assert await value(real_host, sibling.id, "int(held[-1])") == 1
        await service.sandboxes.delete(CALLER, sibling.id)


@pytest.mark.soak(only=True)
@pytest.mark.needs("io")
async def test_a_guests_writes_are_limited_changed_inherited_and_outlive_the_daemon(
    real_host: RealHost,
) -> None:
    service, disk = real_host.service, disk_of(real_host.settings.tops_dir)
    limited = ForkOptions(io_limit_mib_s=1, io_limit_ops=1_000)
    async with real_host.forked(1, limited) as (sandbox,):
        group = real_host.names.cgroup_root / sandbox.id
        assert (group / "io.max").read_text() == (
            f"{disk} rbps=1048576 wbps=1048576 riops=1000 wiops=1000\n"
        )
        began_s = time.monotonic()
        await shell(real_host, sandbox.id, WRITE)
        assert time.monotonic() - began_s > WRITTEN_AT_LEAST_S
        used = (await service.usage.get(CALLER, sandbox.id)).io
        assert used is not None
        assert used.written_bytes >= WRITTEN_BYTES
        assert used.writes > 0

        change = NewLimits(io_limit_mib_s=500)
        assert (
            await service.sandboxes.set_limits(CALLER, sandbox.id, change)
        ).io_limit_ops == 1_000
        branched = await service.branches.branch(CALLER, sandbox.id, 1, BranchOptions())
        (sibling,) = branched.fork.sandboxes
        for each in (sandbox, sibling):
            line = (real_host.names.cgroup_root / each.id / "io.max").read_text()
            assert line == f"{disk} rbps=524288000 wbps=524288000 riops=1000 wiops=1000\n"
        await service.sandboxes.delete(CALLER, sibling.id)

        await real_host.restart()
        found = await real_host.service.sandboxes.get(CALLER, sandbox.id)
        assert (found.io_limit_mib_s, found.io_limit_ops) == (500, 1_000)
