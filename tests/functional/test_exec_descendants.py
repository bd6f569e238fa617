"""A command that is killed takes all that it started with it; one that ends well does not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.engine.guest_exec import GuestExec
from forkd.model.exec import ExecRequest, Exited, Stdout
from tests.support.real_host import REAL
from tests.support.vmm_bench import bench_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.exec import ExecEvent
    from tests.support.real_host import RealHost
    from tests.support.vmm_bench import Bench, Machine

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

TIMEOUT_S = 10.0

SPREAD = "setsid -f sleep 90001; (setsid sleep 90002 &); sleep 90003 & echo started; wait"
"""Starts a process that forks twice, one in a session of its own, and one in the same group."""

LEAVE = "setsid -f sleep 90004; echo left"

REQUESTS = """
import socket, urllib.request
def answers():
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", 8000)) == 0
while not answers():
    pass
[urllib.request.urlopen("http://127.0.0.1:8000/").status for _ in range(3)]
"""
"""Asks a server three times, once it listens; it writes a line about each request."""

ALIVE = """
import pathlib
def words(process):
    try:
        return (process / "cmdline").read_bytes().split(b"\\0")
    except OSError:
        return []
sleepers = [words(each) for each in pathlib.Path("/proc").glob("[0-9]*")]
sorted(int(each[1]) for each in sleepers if each[:1] == [b"sleep"])
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(real_host: RealHost) -> AsyncIterator[Bench]:
    async with bench_of(real_host) as made:
        yield made


async def finished(machine: Machine, command: str, timeout_s: float | None) -> list[ExecEvent]:
    """Run a command to its end."""
    with machine.guest() as guest:
        request = ExecRequest(("sh", "-c", command), timeout_s=timeout_s)
        async with await GuestExec.start(guest, request) as running:
            return [event async for event in running]


async def alive(machine: Machine, *expected: int) -> None:
    """Wait until just the expected sleepers are left."""
    async with asyncio.timeout(60):
        while await machine.value(ALIVE) != list(expected):
            pass


def said(events: list[ExecEvent]) -> bytes:
    return b"".join(event.data for event in events if isinstance(event, Stdout))


@pytest.mark.soak(only=True)
async def test_a_fork_finds_agent_and_runtime_where_no_accounts_are_kept(bench: Bench) -> None:
    cgroups = "[open(f'/proc/{process}/cgroup').read() for process in (1, 'self')]"
    async with bench.forked(bench.root) as (machine,):
        assert await machine.value(cgroups) == ["0::/\n", "0::/\n"]

        await finished(machine, "true", TIMEOUT_S)

        agents, runtimes = await machine.value(cgroups)
        assert (agents.rpartition("/")[0], runtimes) == ("0::/forkd", "0::/\n")


@pytest.mark.soak(only=True)
async def test_a_command_whose_time_is_over_ends_with_all_that_it_has_started(bench: Bench) -> None:
    async with bench.forked(bench.root) as (machine,):
        left = await finished(machine, LEAVE, None)
        events = await finished(machine, SPREAD, TIMEOUT_S)

        assert (said(left), said(events)) == (b"left\n", b"started\n")
        assert [event.timed_out for event in events if isinstance(event, Exited)] == [True]
        await alive(machine, 90004)


async def test_a_server_in_the_background_survives_its_own_log_lines(bench: Bench) -> None:
    async with bench.forked(bench.root) as (machine,):
        events = await finished(machine, "python3 -m http.server 8000 &", None)

        assert [event.truncated for event in events if isinstance(event, Exited)] == [True]
        assert await machine.value(REQUESTS) == [200, 200, 200]


async def test_a_command_whose_client_goes_away_ends_with_all_that_it_has_started(
    bench: Bench,
) -> None:
    async with bench.forked(bench.root) as (machine,):
        with machine.guest() as guest:
            running = await GuestExec.start(guest, ExecRequest(("sh", "-c", SPREAD)))
            async for event in running:
                if isinstance(event, Stdout):
                    break
            await alive(machine, 90001, 90002, 90003)

            await running.aclose()

        await alive(machine)
        assert said(await finished(machine, "echo next", TIMEOUT_S)) == b"next\n"
