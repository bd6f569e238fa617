"""Tasks in real machines: what the fake ones cannot show.

Every run has the examples of docs/howto/run-tasks-in-forks.md on real machines, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import executor as benchmark
from forkd import Sandbox
from forkd.errors import Conflict, NotFound, SandboxLost
from forkd.executor import ForkExecutor
from forkd.sdk import _defaults
from tests.support.real_daemon import daemon_of
from tests.support.real_host import FORK_DEADLINE_S, REAL, TAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.soak(only=True)]

logger = logging.getLogger(__name__)

LONG_BYTES = 3_000_000
"""More than an eval can carry, in both directions."""

MARK = "/tmp/it-works"


@pytest.fixture(autouse=True)
def _connections_end_with_the_program() -> Iterator[None]:
    yield
    _defaults.close_all()


@contextlib.asynccontextmanager
async def serving(host: RealHost, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    async with daemon_of(host) as url:
        monkeypatch.setenv("FORKD_URL", url)
        yield


def use(workers: int) -> None:
    """Use an executor as a program does."""

    def warm() -> None:
        import builtins  # noqa: PLC0415 - the guest's

        import numpy as np  # noqa: PLC0415 - the guest's

        vars(builtins)["table"] = np.arange(10)

    def fail() -> None:
        raise LookupError("nothing there")

    def looked_up(number: int) -> int:
        import builtins  # noqa: PLC0415 - the guest's

        return int(vars(builtins)["table"][number])

    with ForkExecutor(
        TAG, workers=workers, initializer=warm, deadline_s=FORK_DEADLINE_S
    ) as executor:
        assert list(executor.map(looked_up, range(4))) == [0, 1, 2, 3]
        data = os.urandom(LONG_BYTES)
        assert executor.submit(lambda given: given[::-1], data).result() == data[::-1]
        with pytest.raises(LookupError, match="nothing there") as caught:
            executor.submit(fail).result()
        assert "in fail" in str(caught.value.__cause__)
        with pytest.raises(SandboxLost):
            executor.submit(os._exit, 3).result()
        assert executor.submit(looked_up, 5).result() == 5


async def test_tasks_find_what_was_prepared_and_carry_much_and_one_may_be_lost(
    real_host: RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(real_host, monkeypatch):
        await asyncio.to_thread(use, 2)


def use_long(tasks: int, workers: int, fatal: int) -> list[int | BaseException]:
    """Run tasks, and kill the sandbox of one of them while that works."""

    def task(number: int) -> int:
        if number == fatal:
            Path(MARK).touch()
            time.sleep(3600)
        return number * number

    with ForkExecutor(TAG, workers=workers, deadline_s=FORK_DEADLINE_S) as executor:
        futures = [executor.submit(task, number) for number in range(tasks)]
        while not futures[fatal].running():
            wait([futures[fatal]], timeout=0.1)
        while not (found := [each for each in executor.sandbox_ids if has_mark(each)]):
            wait([futures[fatal]], timeout=0.1)
        Sandbox.connect(found[0]).kill()
        return [each.exception() or each.result() for each in futures]


def has_mark(sandbox: str) -> bool:
    with contextlib.suppress(NotFound, Conflict):  # it has ended meanwhile
        return Sandbox.connect(sandbox).files.exists(MARK)
    return False


async def test_of_a_thousand_tasks_over_fifty_machines_one_is_lost_with_its_machine(
    real_host: RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(real_host, monkeypatch):
        results = await asyncio.to_thread(use_long, 1000, 50, 500)

    lost = results[500]
    assert isinstance(lost, SandboxLost)
    assert results == [lost if n == 500 else n * n for n in range(1000)]


async def test_forks_and_processes_are_compared(real_host: RealHost) -> None:
    told: list[str] = []
    async with daemon_of(real_host) as url:
        found = await asyncio.to_thread(benchmark.measured, TAG, url, 1, told.append)

    assert len(told) == benchmark.STEPS
    logger.warning("executor: %s", json.dumps(found))
    assert all(each["ratio"] > 0 for each in found.values())
