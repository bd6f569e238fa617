"""Private disk layers go where they are told, leave room there, and go with their machines."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.support.mounts import mounted
from tests.support.real_host import REAL_IN_SOAK
from tests.support.service_host import until
from tests.support.vmm_bench import bench_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.support.real_host import RealHost
    from tests.support.vmm_bench import Bench

pytestmark = [*REAL_IN_SOAK, pytest.mark.timeout(600)]

MIB = 1 << 20
DISK_MIB = 64
RESERVE_MIB = 32

WRITE = """
import os
def write(name, mib):
    with open(name, "wb") as file:
        try:
            for _ in range(mib):
                file.write(os.urandom(1 << 20))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return error.errno
    return 0
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(real_host: RealHost) -> AsyncIterator[Bench]:
    async with bench_of(real_host) as made:
        yield made


@pytest.fixture
def disk(bench: Bench) -> Iterator[Path]:
    folder = bench.folder()
    with mounted("tmpfs", folder, f"size={DISK_MIB}m"):
        yield folder


def free_mib(folder: Path) -> float:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize / MIB


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_tops_of_machines_and_branches_are_where_they_are_told_and_gone_with_them(
    bench: Bench, disk: Path
) -> None:
    async with bench.forked(bench.root, tops=disk) as (source,):
        assert await source.value(WRITE + "write('/root/a', 4)") == 0
        assert free_mib(disk) < DISK_MIB - 4
        async with (
            bench.branched(source) as (seed, _),
            bench.forked(seed, tops=disk) as (sibling,),
        ):
            assert await source.value("write('/root/b', 4)") == 0
            assert await sibling.value("write('/root/b', 4)") == 0
            assert free_mib(disk) < DISK_MIB - 12
            await sibling.reset()
            assert await sibling.value("os.path.exists('/root/b')") is False
        assert names_in(disk) == set()
        assert await source.value("[os.path.getsize('/root/' + each) for each in 'ab']") == [
            4 * MIB,
            4 * MIB,
        ]

    await until(lambda: free_mib(disk) == DISK_MIB)


async def test_a_write_that_would_use_up_the_reserve_is_an_io_error_in_the_guest(
    bench: Bench, disk: Path
) -> None:
    async with bench.forked(bench.root, tops=disk, reserve_bytes=RESERVE_MIB * MIB) as (greedy,):
        assert await greedy.value(WRITE + f"write('/root/a', {DISK_MIB})") == errno.EIO
        assert RESERVE_MIB <= free_mib(disk) < DISK_MIB - 8
        assert await greedy.value("6 * 7") == 42
