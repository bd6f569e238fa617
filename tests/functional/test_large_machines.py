"""The largest machines: 32 virtual CPUs, and more memory than the host has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.host import proc
from forkd.limits import VCPUS_MAX
from forkd.model.ids import parse_tag
from forkd.model.sandbox import BranchOptions, ForkOptions
from tests.support.callers import CALLER
from tests.support.processors import ON_EVERY_CPU, on_every_cpu
from tests.support.real_host import FRAMES, REAL, baked_host, value, variant

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.model.sandbox import Sandbox
    from tests.support.bakes import Bakes
    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.asyncio, pytest.mark.timeout(1800)]

MIB, GIB = 1 << 20, 1 << 30

MEMORY_GIB = 64

STORED_MAX = 2 * GIB
"""What may be stored of 64 GiB: the guest's kernel keeps 64 bytes for each page, so 1 GiB."""

LINK_MAX = 128 * MIB
"""What may be stored of a guest that has written 16 MiB since it was forked."""

HIGH_FRAME = 32 * GIB // 4096

DEADLINE_S = 300.0


# Not under QEMU, which forgets an interrupt now and then (docs/adr/0003-helper-machine.md): of two
# runs there, one ended with a CPU that nobody woke; eight branches on Bochs had none.
@pytest.mark.needs("invariant-tsc")
async def test_32_cpus_work_in_a_fork_a_branch_and_after_a_reset(
    tmp_path: Path, bakes: Bakes
) -> None:
    recipe = variant(tmp_path / "wide", vcpus=VCPUS_MAX, memory_mib=1024)
    async with baked_host(bakes, recipe) as host:
        async with host.forked(1, ForkOptions()) as (child,):
            for _ in range(2):
                assert await value(host, child.id, ON_EVERY_CPU) == on_every_cpu(VCPUS_MAX)
                await host.service.sandboxes.reset(CALLER, child.id, deadline_s=DEADLINE_S)

            branch = await branched(host, child)
            for each in (branch, child):
                assert await value(host, each.id, ON_EVERY_CPU) == on_every_cpu(VCPUS_MAX)
        await host.clear()


@pytest.mark.soak(only=True)
async def test_64_gib_are_stored_forked_and_branched_as_far_as_they_were_touched(
    tmp_path: Path, bakes: Bakes
) -> None:
    recipe = variant(tmp_path / "tall", warmup=FRAMES, memory_mib=MEMORY_GIB << 10)
    async with baked_host(bakes, recipe) as host:
        assert proc.memory_bytes()[0] < MEMORY_GIB * GIB, "the host has as much"
        assert allocated(host.snapshot.directory) < STORED_MAX
        async with host.forked(2, ForkOptions()) as (child, other):
            assert await value(host, child.id, WRITE) == [True, True]
            tag = parse_tag("tall")
            link = await host.service.branches.snapshot(CALLER, child.id, tag, wait=True)
            assert allocated(link.directory) < LINK_MAX

            branch = await branched(host, child)
            assert await value(host, branch.id, WRITTEN) is True
            await host.service.sandboxes.reset(CALLER, child.id, deadline_s=DEADLINE_S)
            assert await value(host, child.id, "'fresh' in globals()") is False
            assert await value(host, other.id, WRITE) == [True, True]
        await host.clear()


WRITE = f"""
total = int(open("/proc/meminfo").readline().split()[1]) << 10
fresh = numpy.arange(4 << 20, dtype=numpy.uint32)
where = frames(fresh.ctypes.data, fresh.nbytes // 4096)
[total > {MEMORY_GIB * GIB * 0.95}, bool((where >= {HIGH_FRAME}).any())]
"""

WRITTEN = "bool((fresh == numpy.arange(4 << 20, dtype=numpy.uint32)).all())"


async def branched(host: RealHost, source: Sandbox) -> Sandbox:
    options = BranchOptions(deadline_s=DEADLINE_S)
    result = await host.service.branches.branch(CALLER, source.id, 1, options)
    assert result.fork.failures == ()
    (branch,) = result.fork.sandboxes
    return branch


def allocated(folder: Path) -> int:
    """Return the bytes that the files of a folder take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
