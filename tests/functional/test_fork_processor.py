"""What was under way in a machine goes on in each fork of it: registers, timers, clocks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.model.sandbox import BranchOptions, ForkOptions
from tests.support.callers import CALLER
from tests.support.real_host import REAL, baked_host, shell, value, variant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.bakes import Bakes
    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

CHILDREN = ForkOptions()

TIMER_DEADLINE_S = 60.0

WARMUP = '''
import signal, subprocess, sys, time

BUSY = """
import ctypes, os, signal
UPWARD = 0x800
tiny = 1e-30
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
os.nice(19)
assert ctypes.CDLL("libm.so.6").fesetround(UPWARD) == 0
print("rounds upward", flush=True)
while True:
    upward = 1.0 + tiny > 1.0
    if asked or not upward:
        asked.clear()
        print("upward" if upward else "nearest", flush=True)
"""

# It never lets the processor go idle, so at the snapshot its registers are in the processor.
busy = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
assert busy.stdout.readline() == "rounds upward\\n"

CLOCKS = [time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW, time.CLOCK_BOOTTIME]
before = [time.clock_gettime(clock) for clock in CLOCKS]
'''
"""A program that computes without a pause, in a rounding mode that is not the processor's own."""

KERNEL_LOG = """
import os
records, log = [], os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
try:
    while True:
        head, _, message = os.read(log, 8192).decode().partition(";")
        records.append([int(head.split(",")[2]), message])
except BlockingIOError:
    os.close(log)
records
"""
"""What the kernel has said, with its own clock's microseconds."""

WIREGUARD = "mount -t tmpfs none /sys/module && mkdir /sys/module/wireguard"
"""Has the guest look as if its kernel had WireGuard, which the images of tests do not have."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory, bakes: Bakes) -> AsyncIterator[RealHost]:
    """A host with a snapshot of a machine in the middle of a computation."""
    folder = tmp_path_factory.mktemp("recipes") / "busy"
    async with baked_host(bakes, variant(folder, warmup=WARMUP)) as baked:
        yield baked


async def test_a_computation_goes_on_with_what_it_had_in_its_registers(host: RealHost) -> None:
    ask = "busy.send_signal(signal.SIGUSR1)\nbusy.stdout.readline()"
    async with host.forked(2, CHILDREN) as children:
        for child in children:
            assert await value(host, child.id, ask) == "upward\n"


async def test_timers_go_off_in_a_child_that_is_never_idle(host: RealHost) -> None:
    async with host.forked(2, CHILDREN) as children:
        async with asyncio.timeout(TIMER_DEADLINE_S):
            for child in children:
                assert await value(host, child.id, "time.sleep(0.05) or True") is True


async def test_no_clock_of_a_child_goes_back_or_stands_still(host: RealHost) -> None:
    code = "[after - first for after, first in zip(map(time.clock_gettime, CLOCKS), before)]"
    async with host.forked(1, CHILDREN) as (child,):
        first = await value(host, child.id, code)
        second = await value(host, child.id, code)

    assert all(0 < once < again for once, again in zip(first, second, strict=True))


async def test_the_clock_of_the_kernels_log_does_not_go_back(host: RealHost) -> None:
    async with host.forked(1, CHILDREN) as (child,):
        records = await value(host, child.id, KERNEL_LOG)
        await shell(host, child.id, "echo 1 > /proc/sys/vm/drop_caches")
        last = (await value(host, child.id, KERNEL_LOG))[-1]

    times = [at for at, _ in [*records, last]]
    assert times == sorted(times)
    assert "drop_caches: 1" in last[1]


async def test_a_kernel_with_wireguard_is_told_that_it_was_forked_and_no_other(
    host: RealHost,
) -> None:
    async with host.forked(1, CHILDREN) as (source,):
        assert generations(await value(host, source.id, KERNEL_LOG)) == 0
        await shell(host, source.id, WIREGUARD)
        branched = await host.service.branches.branch(CALLER, source.id, 1, BranchOptions())
        (sibling,) = branched.fork.sandboxes
        try:
            assert generations(await value(host, sibling.id, KERNEL_LOG)) == 1
            assert generations(await value(host, source.id, KERNEL_LOG)) == 0
        finally:
            await host.service.sandboxes.delete(CALLER, sibling.id)


def generations(records: list[tuple[int, str]]) -> int:
    """Return how often a kernel has seen another generation id, by its log."""
    return sum("due to virtual machine fork" in message for _, message in records)
