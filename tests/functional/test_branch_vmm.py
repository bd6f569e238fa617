"""A running machine forks a seed, and siblings of that are what it was at one instant.

The engine alone, beside a service that only baked: tests own the processes that they start.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from forkd import programs
from forkd.engine.configs import LinkConfig
from forkd.engine.control import Control
from forkd.engine.process import ZYGOTE_SOCKET, end_listener, start_zygote
from forkd.errors import CapacityError, Conflict
from forkd.host import proc
from tests.support.mounts import mounted
from tests.support.real_host import (
    BAKES_LARGE,
    LARGE_MEMORY_MIB,
    LARGE_VCPUS,
    REAL_IN_SOAK,
    baked_host,
    large,
)
from tests.support.switches import PRIORITY_OF_FIFO_0, PRIORITY_OF_NICE_0, switches_to
from tests.support.vmm_bench import FORK_DEADLINE_S, bench_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.support.bakes import Bakes
    from tests.support.soak import Soak
    from tests.support.vmm_bench import Bench, Machine

pytestmark = [*REAL_IN_SOAK, BAKES_LARGE, pytest.mark.timeout(600)]

SIBLING_RESETS = 3

COUNTER_RESETS = 30

COUNTER = """
import ctypes, mmap, os
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("0f31 48c1e220 4809d0 c3"))  # rdtsc; shl rdx, 32; or rax, rdx; ret
read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
read()
"""
"""Reads the processor's time stamp counter, in the guest and on the host."""

COUNTING = """
import itertools, os, threading, time
counts = [0] * os.cpu_count()
numbers = numpy.arange(1 << 20, dtype=numpy.uint32)
stop = False


def count(cpu):
    os.sched_setaffinity(0, {cpu})
    while not stop:
        counts[cpu] += 1
        time.sleep(0.001)  # or each would wait for the interpreter's lock most of the time


threads = [threading.Thread(target=count, args=[cpu]) for cpu in range(os.cpu_count())]
for thread in threads:
    thread.start()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory, bakes: Bakes) -> AsyncIterator[Bench]:
    """A zygote of a machine with four CPUs and memory on both sides of the hole."""
    recipe = large(tmp_path_factory.mktemp("recipes") / "large")
    async with baked_host(bakes, recipe) as host, bench_of(host) as made:
        yield made


@pytest.fixture
def small_disk(bench: Bench) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = bench.folder()
    with mounted("tmpfs", folder, "size=1m"):
        yield folder


def tasks(pid: int) -> dict[int, str]:
    """Return the names of a process's threads, by their numbers."""
    numbers = [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]
    return {number: proc.name(number) for number in numbers}


async def ports_of_two_clients(machine: Machine) -> tuple[int, int]:
    """Return the ports of the host's that two clients have at the same time."""
    async with machine.calling() as first, machine.calling() as second:
        return first, second


def counter() -> int:
    """Return the host's time stamp counter, which is as fast as that of guests here."""
    program, names = COUNTER.rsplit("\n", 2)[0], dict[str, Any]()
    exec(program, names)  # noqa: S102 - it is ours
    return int(names["read"]())


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_siblings_have_the_variables_of_the_instant_and_the_source_goes_on(
    bench: Bench,
) -> None:
    async with bench.forked(bench.root) as (source,):
        await source.value("x = 1; x")
        async with bench.branched(source) as (seed, branched):
            assert branched.pause_ms > 0
            assert await source.value("x += 1; x") == 2

            async with bench.forked(seed, 2) as siblings:
                for sibling in siblings:
                    assert await sibling.value("x") == 1
                assert await siblings[0].value("x = 7; x") == 7
                assert await siblings[1].value("x") == 1
        assert await source.value("x") == 2


async def test_a_disk_is_frozen_with_memory_and_written_apart(bench: Bench) -> None:
    write = "import os; open('/root/mark', 'w').write({!r}) and os.sync()"
    read = "open('/root/mark').read()"
    async with bench.forked(bench.root) as (source,):
        await source.value(write.format("before"))
        async with bench.branched(source) as (seed, _):
            await source.value(write.format("source"))
            async with bench.forked(seed) as (sibling,):
                assert await sibling.value(read) == "before"
                await sibling.value(write.format("sibling"))
                assert await sibling.value(read) == "sibling"
            assert await source.value(read) == "source"


async def test_the_first_client_has_the_connection_that_made_the_machine_its_own(
    bench: Bench,
) -> None:
    async with (
        bench.forked(bench.root) as (source,),
        source.calling() as last,
        bench.branched(source) as (seed, _),
        bench.forked(seed) as (sibling,),
    ):
        before = await ports_of_two_clients(sibling)
        await sibling.reset()
        after = await ports_of_two_clients(sibling)

    assert before == after == (last + 1, last + 2)


async def test_threads_on_every_cpu_go_on_in_source_and_sibling(bench: Bench) -> None:
    async with bench.forked(bench.root) as (source,):
        await source.value(COUNTING)
        async with bench.branched(source) as (seed, _), bench.forked(seed) as (sibling,):
            for machine in (source, sibling):
                before = await machine.value("list(counts)")
                wait = "while any(new <= old for new, old in zip(counts, before)): pass"
                await machine.value(f"before = {before}\n{wait}\nTrue")
                assert await machine.value("int(numbers.sum(dtype='u8'))") == sum(range(1 << 20))


async def test_a_source_that_stands_still_comes_first_and_its_seed_does_not(bench: Bench) -> None:
    async with bench.forked(bench.root) as (source,):
        await source.value(COUNTING)
        vcpus = [task for task, name in tasks(source.pid).items() if name.startswith("vcpu")]
        assert len(vcpus) == LARGE_VCPUS
        with switches_to([*vcpus, source.pid]) as seen:
            async with bench.branched(source) as (_, branched):
                for machine in (source.pid, branched.pid):
                    policies = {os.sched_getscheduler(task) for task in tasks(machine)}
                    # What a thread was urgent with stays: forks do not inherit what it is.
                    assert policies <= {os.SCHED_OTHER, os.SCHED_RESET_ON_FORK}
                await source.value("before = list(counts)")
                await source.value("while any(map(int.__eq__, counts, before)): pass")

    vcpu = {PRIORITY_OF_FIFO_0 - 1, PRIORITY_OF_NICE_0}
    assert seen.pop(source.pid) == {PRIORITY_OF_FIFO_0 - 2, PRIORITY_OF_NICE_0}
    assert seen == dict.fromkeys(vcpus, vcpu)


async def test_a_branch_of_a_branch_of_a_paused_machine(bench: Bench) -> None:
    async with bench.forked(bench.root) as (source,):
        await source.value("steps = ['first']; steps")
        async with await source.control() as control:
            await control.pause()
            async with bench.branched(source) as (seed, branched):
                assert branched.pause_ms == 0
                assert (await control.status()).state == "paused"
                async with bench.forked(seed) as (sibling,):
                    await sibling.value("steps.append('second'); steps")
                    async with bench.branched(sibling) as (deep, _), bench.forked(deep) as (last,):
                        assert await last.value("steps") == ["first", "second"]
            await control.resume()
        assert await source.value("steps") == ["first"]


async def test_a_delta_holds_what_its_source_was_and_only_what_differs(bench: Bench) -> None:
    change = "import os; y = numpy.full(1 << 20, 3.0); open('/root/f', 'w').write('z'); os.sync()"
    async with bench.forked(bench.root) as (source,):
        await source.value(change)
        async with bench.branched(source) as (seed, _):
            await source.value("y = None")
            delta = await bench.saved(seed)
    assert delta.memory.stat().st_size < bench.config.memory[0].stat().st_size / 2

    async with bench.derived(bench.root, delta) as zygote, bench.forked(zygote, 2) as restored:
        for machine in restored:
            assert await machine.value("[float(y.sum()), open('/root/f').read()]") == [
                3.0 * (1 << 20),
                "z",
            ]
        await restored[0].value("y[:] = 0; 0")
        await restored[0].reset()
        assert await restored[0].value("float(y.sum())") == 3.0 * (1 << 20)


async def test_a_full_disk_is_said_and_leaves_nothing_and_the_seed_serves(
    bench: Bench, small_disk: Path
) -> None:
    async with bench.forked(bench.root) as (source,), bench.branched(source) as (seed, _):
        async with await Control.connect(seed / ZYGOTE_SOCKET) as control:
            with pytest.raises(CapacityError, match="No space"):
                await control.save_link(LinkConfig(small_disk))
        assert names_in(small_disk) == set()

        async with bench.forked(seed) as (sibling,):
            assert await sibling.value("6 * 7") == 42
        assert await source.value("6 * 7") == 42


async def test_a_machine_goes_back_to_its_fork_point_again_and_again(
    bench: Bench, soak: Soak
) -> None:
    dirty = "import os; z = numpy.ones(1 << 20); open('/root/f', 'w').write('f'); os.sync()"
    state = "[globals().get('z'), __import__('os').path.exists('/root/f')]"
    async with bench.forked(bench.root) as (machine,):
        await machine.value(dirty)
        await machine.reset()
        assert await machine.value(state) == [None, False]
        first = machine.held()
        for _ in range(soak.count(15, 50)):
            await machine.value(dirty)
            await machine.reset()

        assert await machine.value(state) == [None, False]
        threads, descriptors, own_kib = machine.held()
        assert (threads, descriptors) <= (first[0], first[1] + 2)
        assert own_kib < first[2] + 1_024


async def test_the_counter_of_a_machine_goes_back_however_often_it_is_reset(bench: Bench) -> None:
    """KVM takes a counter that is written within a second of the last one for the same as that."""
    async with bench.forked(bench.root) as (machine,):
        first = await machine.value(COUNTER)
        for _ in range(COUNTER_RESETS):
            begun = counter()
            await machine.reset()
            now = await machine.value(COUNTER)

            assert now - first <= counter() - begun


async def test_processors_of_a_machine_have_one_counter_after_a_reset(bench: Bench) -> None:
    spread = (
        COUNTER
        + """
readings = [read()]
for _ in range(8):
    for cpu in range(os.cpu_count()):
        os.sched_setaffinity(0, {cpu})
        readings.append(read())
readings == sorted(readings)
"""
    )
    async with bench.forked(bench.root) as (machine,):
        assert await machine.value(spread) is True
        await machine.reset()
        assert await machine.value(spread) is True


async def test_a_sibling_goes_back_to_what_its_seed_holds(bench: Bench) -> None:
    counted = "counted = numpy.arange({pages} << 9, dtype='u8'); 0"
    wrong = "[int((counted != numpy.arange(counted.size)).sum()), 'z' in globals()]"
    async with bench.forked(bench.root) as (source,):
        await source.value(counted.format(pages=LARGE_MEMORY_MIB))
        async with bench.branched(source) as (seed, _), bench.forked(seed) as (sibling,):
            async with await Control.connect(seed / ZYGOTE_SOCKET) as control:
                assert await control.retire() == 1
            assert not (seed / ZYGOTE_SOCKET).exists()
            held = []
            for _ in range(SIBLING_RESETS):
                await sibling.value("counted[::512] = 0; z = numpy.ones(1 << 20); 0")
                await sibling.reset()
                held.append(sibling.held())
                assert await sibling.value(wrong) == [0, False]
        threads, descriptors, own_kib = held[0]
        assert all(each[:2] <= (threads, descriptors + 2) for each in held)
        assert max(each[2] for each in held) < own_kib + 4_096


async def test_a_sibling_whose_seed_was_told_to_stop_is_not_reset_and_lives_on(
    bench: Bench,
) -> None:
    async with (
        bench.forked(bench.root) as (source,),
        bench.branched(source) as (seed, branched),
        bench.forked(seed) as (sibling,),
    ):
        await end_listener(seed / ZYGOTE_SOCKET)
        assert branched.pid not in proc.processes()

        with pytest.raises(Conflict, match="which has its fork point, has ended"):
            await sibling.reset()

        assert await sibling.value("6 * 7") == 42


async def test_a_snapshots_zygote_that_is_retired_ends_at_once(bench: Bench) -> None:
    config = replace(bench.config, directory=bench.folder())
    with await start_zygote(programs.find(programs.VMM), config) as process:
        async with bench.forked(config.directory):
            async with await Control.connect(config.directory / ZYGOTE_SOCKET) as control:
                assert await control.retire() == 0
            assert await process.wait(FORK_DEADLINE_S)
