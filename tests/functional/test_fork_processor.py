"""What was under way in a machine goes on in each fork of it: registers, timers, clocks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from forkd.model.sandbox import BranchOptions, ForkOptions
from tests.support.callers import CALLER
from tests.support.real_host import REAL_IN_SOAK, baked_host, shell, value, variant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.bakes import Bakes
    from tests.support.real_host import RealHost

pytestmark = [*REAL_IN_SOAK, pytest.mark.timeout(600)]

CHILDREN = ForkOptions()

RESET_DEADLINE_S = 120.0
TIMER_DEADLINE_S = 60.0

WARMUP = '''
import subprocess, sys, time

BUSY = """
import ctypes, json, mmap, os, struct, sys, threading

HOLD = bytes.fromhex(
    "c5f8ae5724"      # vldmxcsr [rdi+36]         how to round
    "c57e6f3f"        # vmovdqu  ymm15, [rdi]     32 bytes
    "c7472c01000000"  # mov      dword [rdi+44], 1
    "837f2000"        # cmp      dword [rdi+32], 0
    "74fa"            # je       to the line before, until asked
    "c57e7f7f40"      # vmovdqu  [rdi+64], ymm15
    "c5f8ae5f60"      # vstmxcsr [rdi+96]
    "31c9"            # xor      ecx, ecx
    "0f01d0"          # xgetbv
    "894764"          # mov      [rdi+100], eax   states of registers that are enabled
    "c5f8ae5728"      # vldmxcsr [rdi+40]
    "c5f877"          # vzeroupper
    "c3"              # ret
)
UPWARD, NEAREST = 0x5F80, 0x1F80
page = mmap.mmap(-1, 4096)
page[:48] = bytes(range(1, 33)) + struct.pack("<4I", 0, UPWARD, NEAREST, 0)
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code[: len(HOLD)] = HOLD
at = lambda memory: ctypes.addressof(ctypes.c_char.from_buffer(memory))
hold = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(at(code))

def work():
    os.nice(19)
    hold(at(page))

worker = threading.Thread(target=work)
worker.start()
while page[44] == 0:
    os.sched_yield()
print("holds", flush=True)
sys.stdin.readline()
page[32] = 1
worker.join()
wide, (rounding, states) = page[64:96], struct.unpack("<2I", page[96:104])
print(json.dumps({"wide": wide.hex(), "rounding": rounding & 0x6000, "states": states}), flush=True)
"""

# It never lets the processor go idle, so at the snapshot its registers are in the processor.
busy = subprocess.Popen(
    [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
assert busy.stdout.readline() == "holds\\n"

CLOCKS = [time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW, time.CLOCK_BOOTTIME]
before = [time.clock_gettime(clock) for clock in CLOCKS]
'''
"""A program that computes without a pause, with a wide register and a rounding mode of its own."""

ASK = """
import json
print("", file=busy.stdin, flush=True)
json.loads(busy.stdout.readline())
"""

HELD = {"wide": bytes(range(1, 33)).hex(), "rounding": 0x4000, "states": 7}
"""What it holds: 32 bytes in a register of AVX, upward rounding, and which states are enabled."""

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
    async with host.forked(2, CHILDREN) as children:
        for child in children:
            assert holds(await value(host, child.id, ASK))


async def test_a_branch_and_a_reset_keep_what_a_computation_has_in_its_registers(
    host: RealHost,
) -> None:
    async with host.forked(1, CHILDREN) as (source,):
        branched = await host.service.branches.branch(CALLER, source.id, 1, BranchOptions())
        (sibling,) = branched.fork.sandboxes
        try:
            assert holds(await value(host, sibling.id, ASK))
        finally:
            await host.service.sandboxes.delete(CALLER, sibling.id)
        assert holds(await value(host, source.id, ASK))
        await host.service.sandboxes.reset(CALLER, source.id, deadline_s=RESET_DEADLINE_S)
        assert holds(await value(host, source.id, ASK))


async def test_the_kernel_of_a_guest_finds_xsave_consistent(host: RealHost) -> None:
    async with host.forked(1, CHILDREN) as (child,):
        flags = (await shell(host, child.id, "grep -m1 ^flags /proc/cpuinfo")).split()
        log = await value(host, child.id, KERNEL_LOG)

    assert {"xsave", "avx", "avx2"} <= set(flags)
    assert not [message for _, message in log if "XSAVE consistency" in message]


def holds(held: dict[str, Any]) -> bool:
    """Whether a program still has what it `HELD`; a processor may have more states."""
    return {**held, "states": held["states"] & 7} == HELD


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
