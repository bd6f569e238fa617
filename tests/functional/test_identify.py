"""A running machine takes another identity, and nothing of what it does ends."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.engine.guest_exec import GuestExec
from forkd.errors import Conflict, GuestError
from forkd.model.exec import ExecRequest, Exited, Stdout
from tests.support.real_host import REAL
from tests.support.vmm_bench import FORK_DEADLINE_S, bench_of, identity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.engine.configs import Identity
    from tests.support.real_host import RealHost
    from tests.support.vmm_bench import Bench, Machine

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

CLOCK_ERROR_S = 0.1
"""The tolerance of the handshake, and what a busy host may take between a reading and its use."""

SET_BACK = """
import time
kept = "kept"
time.clock_settime(time.CLOCK_REALTIME, time.time() - 3600)
"""

SELF = """
import pathlib, socket, time
[kept, socket.gethostname(), pathlib.Path("/etc/machine-id").read_text().strip(), time.time()]
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(real_host: RealHost) -> AsyncIterator[Bench]:
    async with bench_of(real_host) as made:
        yield made


async def identify(
    machine: Machine, another: Identity, deadline_s: float = FORK_DEADLINE_S
) -> None:
    async with await machine.control() as control:
        assert await control.identify("sb-another", another, deadline_s=deadline_s) > 0


async def test_identity_and_clock_change_and_what_runs_in_the_guest_lives_on(bench: Bench) -> None:
    another = identity("other")
    async with bench.forked(bench.root) as (machine,):
        await machine.value(SET_BACK)
        with machine.guest() as guest:
            async with await GuestExec.start(guest, ExecRequest(("cat",), stdin=True)) as command:
                await identify(machine, another)
                await command.write_stdin(b"still here")
                await command.close_stdin()
                events = [event async for event in command]
        before = time.time()
        *found, clock = await machine.value(SELF)
        after = time.time()

    assert found == ["kept", another.hostname, another.machine_id]
    assert before - CLOCK_ERROR_S <= clock <= after + CLOCK_ERROR_S
    assert [event.data for event in events if isinstance(event, Stdout)] == [b"still here"]
    assert [event.exit_code for event in events if isinstance(event, Exited)] == [0]


async def test_a_machine_that_cannot_take_an_identity_goes_on_and_can_be_asked_again(
    bench: Bench,
) -> None:
    async with bench.forked(bench.root) as (machine,):
        with machine.guest() as guest:
            await machine.value("kept = 'kept'; kept")
            await guest.ask("configure", {"post_fork_command": ["/bin/false"]})
            with pytest.raises(GuestError, match="/bin/false ended with exit status 1"):
                await identify(machine, identity("refused"))

            await guest.ask("configure", {"post_fork_command": ["/bin/sleep", "3600"]})
            with pytest.raises(GuestError, match="has not answered within the deadline"):
                await identify(machine, identity("late"), deadline_s=0.01)

            await guest.ask("configure", {"post_fork_command": ["/bin/true"]})
        another = identity("last")
        await identify(machine, another)
        *found, _ = await machine.value(SELF)

    assert found == ["kept", another.hostname, another.machine_id]


async def test_a_paused_machine_is_not_identified(bench: Bench) -> None:
    async with bench.forked(bench.root) as (machine,):
        async with await machine.control() as control:
            await control.pause()
            with pytest.raises(Conflict, match="paused"):
                await identify(machine, identity("paused"))
            await control.resume()

        await identify(machine, identity("resumed"))


async def test_one_identity_is_taken_at_a_time_and_a_reset_ends_that(bench: Bench) -> None:
    async with bench.forked(bench.root) as (machine,):
        with machine.guest() as guest:
            await guest.ask("configure", {"post_fork_command": ["/bin/sleep", "3600"]})
        both = [asyncio.create_task(identify(machine, identity(name))) for name in ("one", "two")]

        (second,), (first,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(Conflict, match="already"):
            await second
        await machine.reset()
        with pytest.raises(Conflict, match="reset meanwhile"):
            await first

        assert await machine.value("__import__('socket').gethostname()") == "again"
