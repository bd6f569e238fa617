"""A thousand tasks over fifty forks, of which one is killed: in processes that can really die.

The machines are the fake VMM's; test_executor_machines.py has real ones.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from forkd import Client
from forkd.errors import SandboxLost
from forkd.executor import ForkExecutor
from forkd.host import proc
from tests.support.forked_daemon import with_snapshot
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.fake_daemon import FakeDaemon

TASKS, FORKS, FATAL = 1000, 50, 500


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    """A daemon with a snapshot that has been forked."""
    proc.raise_open_files_limit()
    with with_snapshot(tmp_path_factory.mktemp("host")) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    """A client of the daemon, which has no sandboxes afterwards."""
    with Client(daemon.url) as client:
        yield client
        assert client.sandboxes.list() == []


def deadly(mark: Path, fatal: int) -> Callable[[int], int]:
    """Return a task that ends its machine at one item, the first time that it is asked to."""

    def task(number: int) -> int:
        if number == fatal and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    return task


def outcomes(executor: ForkExecutor, task: Callable[[int], int], count: int) -> list[object]:
    futures = [executor.submit(task, number) for number in range(count)]
    return [each.exception(60) or each.result() for each in futures]


def test_of_a_thousand_tasks_over_fifty_forks_one_is_lost_with_its_fork(
    client: Client, tmp_path: Path
) -> None:
    with ForkExecutor(TAG, workers=FORKS, client=client) as executor:
        results = outcomes(executor, deadly(tmp_path / "mark", FATAL), TASKS)

    lost = results[FATAL]
    assert isinstance(lost, SandboxLost)
    assert str(lost.context["sandbox"]) in str(lost)
    expected: list[object] = [number * number for number in range(TASKS)]
    expected[FATAL] = lost
    assert results == expected


def test_a_lost_task_is_run_again_if_asked(client: Client, tmp_path: Path) -> None:
    with ForkExecutor(TAG, workers=4, retries=1, client=client) as executor:
        results = outcomes(executor, deadly(tmp_path / "mark", 5), 20)

    assert results == [number * number for number in range(20)]


def test_a_task_is_lost_if_it_ends_its_machine_at_each_attempt(
    client: Client, tmp_path: Path
) -> None:
    attempts = tmp_path / "attempts"

    def task() -> None:
        with attempts.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    with ForkExecutor(TAG, workers=2, retries=2, client=client) as executor:
        with pytest.raises(SandboxLost):
            executor.submit(task).result(60)
        assert executor.submit(abs, -1).result(60) == 1

    assert attempts.read_text() == "xxx"


def wait_long(begun: Path) -> None:
    begun.touch()
    threading.Event().wait(600)


def test_a_sandbox_that_somebody_kills_takes_its_task_with_it_and_no_other(
    client: Client, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    with ForkExecutor(TAG, workers=1, client=client) as executor:
        lost = executor.submit(wait_long, begun)
        while not begun.exists():
            threading.Event().wait(0.001)
        (worker,) = executor.sandbox_ids
        client.sandboxes.get(worker).kill()
        with pytest.raises(SandboxLost, match=worker):
            lost.result(60)
        assert executor.submit(abs, -2).result(60) == 2


def test_a_task_goes_on_in_a_new_fork_if_its_own_ended_before_it_began(client: Client) -> None:
    with ForkExecutor(TAG, workers=1, client=client) as executor:
        assert executor.submit(abs, -1).result(60) == 1
        (worker,) = executor.sandbox_ids
        client.sandboxes.get(worker).kill()
        assert executor.submit(abs, -2).result(60) == 2
        assert executor.sandbox_ids != [worker]


def test_new_forks_are_made_even_if_the_prepared_sandbox_was_killed(client: Client) -> None:
    with ForkExecutor(TAG, workers=1, client=client) as executor:
        for each in client.sandboxes.list():
            each.kill()
        assert executor.submit(abs, -2).result(60) == 2


def test_each_task_of_a_fresh_executor_finds_what_was_prepared(client: Client) -> None:
    def remember() -> None:
        os.environ["STATE"] = "prepared"

    def change() -> str:
        found = os.environ["STATE"]
        os.environ["STATE"] = "changed"
        return found

    for fresh, found in ((True, ["prepared"] * 3), (False, ["prepared", "changed", "changed"])):
        with ForkExecutor(
            TAG, workers=1, fresh=fresh, initializer=remember, client=client
        ) as executor:
            assert [executor.submit(change).result(60) for _ in range(3)] == found
