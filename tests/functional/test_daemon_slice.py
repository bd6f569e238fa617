"""Everything at once: the SDK, a daemon in a process of its own, and real machines."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from forkd import Client
from forkd.errors import ForkdError, InvalidRequest, NotFound
from forkd.host import nftables
from forkd.network import rules
from forkd.wire import v2
from tests.support.real_daemon import END_TIMEOUT_S, running_daemon
from tests.support.real_host import REAL, RECIPE, TAG
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.bakes import Bakes
    from tests.support.real_daemon import Daemon

pytestmark = [REAL, pytest.mark.timeout(600)]

FILE_BYTES = 5 << 20

BAKE_TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def daemon(bakes: Bakes) -> Iterator[Daemon]:
    """A daemon with a snapshot and its zygote."""
    with running_daemon(bakes.of(RECIPE)) as made:
        with Client(made.url) as client:
            client.fork(TAG)[0].kill()
        yield made


@pytest.fixture
def doomed() -> Iterator[Daemon]:
    """A daemon with nothing yet, for a test of its own."""
    with running_daemon() as made:
        yield made


@pytest.fixture
def doomed_with_base(bakes: Bakes) -> Iterator[Daemon]:
    """A daemon with a base, for a test that kills it."""
    with running_daemon(bakes.of(RECIPE)) as made:
        yield made


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """A client; sandboxes that a test forgets are killed."""
    with Client(daemon.url) as made:
        yield made
        for sandbox in made.sandboxes.list():
            sandbox.kill()
    assert daemon.left() == []


@pytest.mark.soak(only=True)  # over a VMM of the test's: tests/functional/test_service_snapshots.py
def test_a_bake_tells_its_stages_and_its_snapshot_is_listed(doomed: Daemon) -> None:
    progress = list[v2.ProgressEvent]()
    with Client(doomed.url) as client:
        client.snapshots.create(TAG, RECIPE, on_progress=progress.append)

        stages = list(dict.fromkeys(event.stage for event in progress))
        assert stages[-4:] == ["boot", "warm", "quiesce", "save"]
        (snapshot,) = client.snapshots.list()
        assert (snapshot.tag, snapshot.status) == (TAG, "ready")
        assert client.snapshots.info(TAG).tag == TAG


def test_three_children_answer_over_http(client: Client) -> None:
    children = client.fork(TAG, 3)
    zeros = [child.eval("numpy.zeros(5).tolist()").check().value for child in children]
    dice = [child.eval("random.random()").check().value for child in children]

    assert zeros == [[0.0] * 5] * 3
    assert len({str(each) for each in dice}) == 3
    assert {each.id for each in client.sandboxes.list()} == {child.id for child in children}


def test_a_program_streams_while_it_runs(client: Client) -> None:
    (sandbox,) = client.fork(TAG)
    with sandbox.exec_stream(["sh", "-c", "read a; echo got $a; read b; exit 7"], stdin=True) as on:
        on.write(b"one\n")
        output = next(iter(on))
        on.write(b"two\n")
        ended = on.wait()

    assert (output.stream, output.data) == ("stdout", b"got one\n")
    assert ended.exit_code == 7


def test_a_file_of_5_mib_comes_back_as_it_was_sent(client: Client) -> None:
    data = os.urandom(FILE_BYTES)
    (sandbox,) = client.fork(TAG)
    assert sandbox.files.write("/root/deep/down", data, make_parents=True) == FILE_BYTES
    assert sandbox.files.stat("/root/deep/down").size_bytes == FILE_BYTES
    assert sandbox.files.read("/root/deep/down") == data


def test_what_the_guest_says_to_its_console_is_in_its_log(client: Client) -> None:
    (sandbox,) = client.fork(TAG)
    sandbox.exec(["sh", "-c", "echo hello > /dev/console"])
    said = b""
    for piece in sandbox.follow_logs():
        said += piece
        if b"hello" in said:
            break

    assert b"hello" in sandbox.logs()


def test_a_killed_sandbox_is_gone_and_asking_it_is_not_found(
    client: Client, daemon: Daemon
) -> None:
    (sandbox,) = client.fork(TAG)
    pid = sandbox.info.pid
    assert pid in daemon.vmm_processes()
    sandbox.kill()

    assert pid not in daemon.vmm_processes()
    for ask in (sandbox.refresh, sandbox.ping, lambda: sandbox.eval("1"), sandbox.logs):
        with pytest.raises(NotFound):
            ask()


@pytest.mark.parametrize(
    ("tag", "count", "kind"),
    [
        ("unknown", 1, NotFound),
        ("..", 1, ForkdError),
        ("../../etc", 1, InvalidRequest),
        (TAG, 0, InvalidRequest),
        (TAG, 10_001, InvalidRequest),
    ],
)
def test_a_bad_fork_is_one_error_and_leaves_nothing(
    client: Client, tag: str, count: int, kind: type[ForkdError]
) -> None:
    with pytest.raises(kind):
        client.fork(tag, count)

    assert client.sandboxes.list() == []


def test_a_snapshot_cannot_be_named_out_of_its_folder(client: Client) -> None:
    for tag in ("..", "a/../b", "/etc"):
        with pytest.raises(InvalidRequest):
            client.snapshots.create(tag, RECIPE)
        with pytest.raises((InvalidRequest, NotFound)):
            client.snapshots.delete(tag)

    assert [each.tag for each in client.snapshots.list()] == [TAG]


def test_a_daemon_with_other_folders_comes_and_goes_and_leaves_this_ones_machines_alone(
    client: Client, daemon: Daemon
) -> None:
    (sandbox,) = client.fork(TAG, network="host")
    plan = daemon.names.network
    (tap,) = [each for _, each in socket.if_nameindex() if each.startswith(plan.tap_prefix)]
    (cgroup,) = daemon.names.cgroup_root.glob(f"**/{sandbox.id}")

    with running_daemon() as other, Client(other.url) as second:
        assert other.names.cgroup_root != daemon.names.cgroup_root
        assert second.sandboxes.list() == []
        other.end(signal.SIGKILL)
        other.start()

    assert sandbox.eval("6 * 7").check().value == 42
    assert tap in {each for _, each in socket.if_nameindex()}
    assert str(sandbox.info.pid) in (cgroup / "cgroup.procs").read_text().split()
    assert rules.table_name(plan) in str(nftables.read("list tables"))


@pytest.mark.soak(only=True)  # over a VMM of the test's: tests/functional/test_service_recovery.py
def test_a_daemon_killed_in_a_bake_leaves_nothing_after_the_next_start(doomed: Daemon) -> None:
    warming = threading.Event()

    def bake() -> None:
        with Client(doomed.url) as client:
            client.snapshots.create(TAG, RECIPE, on_progress=told)

    def told(event: v2.ProgressEvent) -> None:
        if event.stage == "warm":
            warming.set()

    kill_during(doomed, bake, lambda: warming.wait(BAKE_TIMEOUT_S))
    assert len(doomed.vmm_processes()) == 1

    doomed.start()
    assert doomed.left() == []
    assert doomed.vmm_processes() == set()
    with Client(doomed.url) as client:
        assert client.snapshots.list() == []


@pytest.mark.soak(only=True)  # as above, and tests/functional/test_crashes.py
def test_a_daemon_killed_in_a_fork_adopts_what_was_ready_and_leaves_nothing_else(
    doomed_with_base: Daemon,
) -> None:
    doomed = doomed_with_base
    with Client(doomed.url) as client:
        (before,) = client.fork(TAG)

    def fork() -> None:
        with Client(doomed.url) as client:
            client.fork(TAG, 30)

    folder = doomed.settings.sandboxes_dir
    kill_during(
        doomed, fork, lambda: asyncio.run(until(lambda: len([*folder.glob("*/vsock.sock")]) > 3))
    )

    doomed.start()
    with Client(doomed.url) as client:
        found = client.sandboxes.list()
        assert before.id in {each.id for each in found}
        assert {each.info.pid for each in found} == doomed.vmm_processes()
        for each in found:
            assert each.eval("6 * 7").check().value == 42
            each.kill()
    assert doomed.left() == []
    assert doomed.vmm_processes() == set()


def kill_during(daemon: Daemon, work: Callable[[], None], wait: Callable[[], object]) -> None:
    """Kill the daemon while a client is at `work`, once `wait` has returned; it notices."""
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        wait()
        daemon.end(signal.SIGKILL)
        with pytest.raises(ForkdError):
            working.result(END_TIMEOUT_S)
