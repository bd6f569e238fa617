"""A machine's threads come first while its guest is paused, and at no other time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.host import urgency
from forkd.limits import VCPUS_MAX
from forkd.model.sandbox import BranchOptions, ForkOptions
from tests.support.callers import CALLER
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.service_host import FakeHost

SLEEPERS = """
import sys, threading
wait = threading.Event()
for _ in range(int(sys.argv[1])):
    threading.Thread(target=wait.wait, daemon=True).start()
print(flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def sleeping(more: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of one thread and some more for the block, which sleep."""
    command = [sys.executable, "-S", "-c", SLEEPERS, str(more)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:  # noqa: S603 - ours
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def threads(pid: int) -> list[int]:
    """Return the threads of a process, the first one first."""
    return sorted(int(each.name) for each in Path(f"/proc/{pid}/task").iterdir())


def policies(pid: int) -> list[tuple[int, int]]:
    """Return the policy and the priority of each thread."""
    return [
        (os.sched_getscheduler(each), os.sched_getparam(each).sched_priority)
        for each in threads(pid)
    ]


URGENT, CALM = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK
USUAL = (os.SCHED_OTHER, 0)
needs_right = pytest.mark.needs("root")


@needs_right
async def test_a_machines_threads_are_urgent_within_the_block_and_no_others() -> None:
    with sleeping(VCPUS_MAX + 1) as process:
        with urgency.urgent(process.pid):
            within = policies(process.pid)
        after = policies(process.pid)

    assert within == [(URGENT, 2), *[(URGENT, 1)] * VCPUS_MAX, USUAL]
    assert after == [*[(CALM, 0)] * (VCPUS_MAX + 1), USUAL]


@needs_right
async def test_a_machine_that_is_late_is_urgent_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urgency, "URGENT_S", 0.0)
    with sleeping(1) as process, urgency.urgent(process.pid):
        await until(lambda: policies(process.pid) == [(CALM, 0)] * 2)


@needs_right
async def test_a_machine_is_urgent_again_in_its_next_pause_for_as_long_as_that_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(urgency, "URGENT_S", 0.0)
    with sleeping(0) as process:
        with urgency.urgent(process.pid):
            pass
        monkeypatch.undo()
        with urgency.urgent(process.pid):
            turn = asyncio.Event()
            asyncio.get_running_loop().call_later(0, turn.set)  # after the first pause's timer
            await turn.wait()
            assert policies(process.pid) == [(URGENT, 2)]


@needs_right
async def test_a_policy_that_somebody_has_given_stays() -> None:
    with sleeping(1) as process:
        os.sched_setscheduler(process.pid, os.SCHED_BATCH, os.sched_param(0))
        with urgency.urgent(process.pid):
            first, second = policies(process.pid)
            assert (first, second) == ((os.SCHED_BATCH, 0), (URGENT, 1))
            for thread in threads(process.pid):
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        assert policies(process.pid) == [(os.SCHED_BATCH, 0)] * 2


async def test_a_machine_that_is_gone_or_may_not_be_changed_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sleeping(0) as process, urgency.urgent(process.pid):
        process.kill()
        process.wait()
    with urgency.urgent(process.pid):
        pass

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with sleeping(0) as process, urgency.urgent(process.pid):
        assert policies(process.pid) == [USUAL]


@needs_right
async def test_a_thread_whose_number_became_anothers_is_calmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sleeping(0) as process, sleeping(0) as other:
        monkeypatch.setattr(urgency, "_threads", lambda _: [other.pid])
        with urgency.urgent(process.pid):
            assert policies(other.pid) == [(CALM, 0)]


@needs_right
async def test_a_machine_was_urgent_when_it_has_been_branched_and_not_before(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (source,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        assert source.pid is not None
        before, *_ = policies(source.pid)
        await service.branches.branch(CALLER, source.id, 1, BranchOptions())
        after, *_ = policies(source.pid)
        for each in await service.sandboxes.list(CALLER):
            await service.sandboxes.delete(CALLER, each.id)

    assert (before, after) == (USUAL, (CALM, 0))
