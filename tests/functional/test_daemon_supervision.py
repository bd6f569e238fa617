"""A bug in any task of the service is one error, one traceback, and the end of nothing else.

Each kind of task crashes once, at its start and in its middle, in a real daemon over the fake VMM.
What the daemon cannot do without ends it, with the status that has a service manager start
another, which adopts every sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from forkd.daemon.commands import EXIT_RESTART, EXIT_STOPPED
from forkd.service.supervision import TaskKind
from tests.support.crashing import ARM, WORDS
from tests.support.fake_daemon import FakeDaemon
from tests.support.service_host import TAG, until
from tests.support.soak import only_in_soak

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.service_host import FakeHost

pytestmark = pytest.mark.timeout(120)

CRASHED = re.compile(r"^.* ERROR \S+ (?:request|task) crashed .*$", re.MULTILINE)


@dataclass
class Scene:
    """A daemon with a snapshot and a sandbox."""

    daemon: FakeDaemon
    host: FakeHost
    sandbox: str = ""

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.daemon.http.post(path, json=body)

    def prepare(self) -> None:
        answer = self.post("/v2/snapshots", tag=TAG, recipe=str(self.host.recipe()))
        assert answer.status_code == 201, answer.text
        self.sandbox = self.fork()

    def fork(self) -> str:
        answer = self.post("/v2/sandboxes", snapshot_tag=TAG)
        assert answer.status_code == 201, answer.text
        id_: str = answer.json()[0]["id"]
        return id_

    def arm(self) -> None:
        (self.host.folder / ARM).touch()

    def link(self, tag: str) -> httpx.Response:
        return self.post("/v2/snapshots", tag=tag, source=self.sandbox)

    def until(self, condition: Callable[[], bool]) -> None:
        """Return once something holds, for which there is no event."""
        asyncio.run(until(condition))

    def sandboxes(self) -> list[str]:
        return sorted(each["id"] for each in self.daemon.http.get("/v2/sandboxes").json())

    def crash(self) -> list[str]:
        """Return the lines of the log that tell of the crash, of which one has its traceback."""
        text = self.daemon.log.read_text()
        assert text.count(f"RuntimeError: {WORDS}") == 1
        return CRASHED.findall(text)

    def works(self) -> None:
        """Check that the daemon says that it is well, and is."""
        for path in ("/healthz", "/readyz"):
            assert self.daemon.http.get(path).status_code == 200
        made = self.fork()
        answer = self.post(f"/v2/sandboxes/{made}/eval", code="answer")
        assert answer.json()["value"] == 42
        for each in self.sandboxes():
            answer = self.daemon.http.delete(f"/v2/sandboxes/{each}")
            assert answer.status_code in {204, 404}, answer.text  # it may have been ending
        assert self.sandboxes() == []


def fork(scene: Scene) -> httpx.Response:
    scene.arm()
    return scene.post("/v2/sandboxes", snapshot_tag=TAG, n=3)


def branch(scene: Scene) -> httpx.Response:
    scene.arm()
    return scene.post(f"/v2/sandboxes/{scene.sandbox}/branch", n=2)


def bake(scene: Scene) -> httpx.Response:
    scene.arm()
    return scene.post("/v2/snapshots", tag="other", recipe=str(scene.host.recipe(name="other")))


def build(scene: Scene) -> httpx.Response:
    scene.arm()
    return scene.post("/v2/images", recipe=str(scene.host.recipe(name="other")))


def write(scene: Scene) -> httpx.Response:
    scene.arm()
    return scene.link("written")


def compact(scene: Scene) -> httpx.Response:
    assert scene.link("written").status_code == 201
    scene.arm()
    return scene.post("/v2/snapshots/written/compact", to="compacted")


def fork_by_key(scene: Scene) -> httpx.Response:
    scene.arm()
    key = {"Idempotency-Key": "a-key"}
    return scene.daemon.http.post("/v2/sandboxes", json={"snapshot_tag": TAG}, headers=key)


CONCERNED: dict[TaskKind, Callable[[Scene], httpx.Response]] = {
    TaskKind.FORK: fork,
    TaskKind.BRANCH: branch,
    TaskKind.BAKE: bake,
    TaskKind.BUILD: build,
    TaskKind.WRITE: write,
    TaskKind.COMPACT: compact,
    TaskKind.ANSWER: fork_by_key,
}
"""Kinds of tasks that a request waits for, with one that begins such a task."""


@pytest.mark.parametrize("where", [only_in_soak("start"), "middle"])
@pytest.mark.parametrize("kind", CONCERNED)
def test_the_request_that_waits_for_a_crashed_task_has_a_500_that_the_log_explains(
    fake_host: FakeHost, kind: TaskKind, where: str
) -> None:
    with FakeDaemon(fake_host, (kind, where)) as daemon:
        scene = Scene(daemon, fake_host)
        scene.prepare()

        answer = CONCERNED[kind](scene)

        assert (answer.status_code, answer.json()["code"]) == (500, "internal")
        assert WORDS not in answer.text
        assert scene.sandbox in scene.sandboxes()
        scene.works()

    assert daemon.status == EXIT_STOPPED
    ids = {line.rpartition(" request=")[2] for line in scene.crash()}
    assert ids == {answer.headers["X-Request-Id"]}
    with FakeDaemon(fake_host):  # which removes what the crash has left in mid-air
        assert fake_host.left_over() == []


def lose_zygote(scene: Scene) -> None:
    """Have the daemon find that a zygote has ended."""
    pids = {each["pid"] for each in scene.daemon.http.get("/v2/sandboxes").json()}
    (zygote,) = set(scene.host.vmm_processes()) - pids
    scene.arm()
    os.kill(zygote, signal.SIGKILL)
    scene.post("/v2/sandboxes", snapshot_tag=TAG)


def fail_promotion(scene: Scene) -> None:
    """Have a promotion fail after its transaction, so that it is finished in the background."""
    made = scene.post(f"/v2/sandboxes/{scene.sandbox}/branch", n=1).json()
    scene.arm()
    child = made["sandboxes"][0]["id"]
    assert scene.post(f"/v2/sandboxes/{child}/promote").status_code >= 400


def leave_fork(scene: Scene) -> None:
    """Go away in the middle of a fork, so that what it makes is taken back."""
    before = scene.host.left_over()
    body = json.dumps({"snapshot_tag": TAG, "n": 20})
    scene.arm()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(scene.daemon.socket))
        client.sendall(
            "POST /v2/sandboxes HTTP/1.1\r\nHost: forkd\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        scene.until(lambda: scene.host.left_over() != before)
    scene.until(lambda: WORDS in scene.daemon.log.read_text())


UNATTENDED: dict[TaskKind, tuple[Callable[[Scene], None], str]] = {
    TaskKind.STOP_ZYGOTE: (lose_zygote, ""),
    TaskKind.FINISH_PROMOTION: (fail_promotion, "rename=fail"),
    TaskKind.DELETE: (leave_fork, ""),
}
"""Kinds of tasks that nobody waits for, with what begins one, and the knobs that it needs."""


@pytest.mark.parametrize("where", [only_in_soak("start"), "middle"])
@pytest.mark.parametrize("kind", UNATTENDED)
def test_a_crash_that_nobody_waits_for_is_in_the_log_and_the_rest_goes_on(
    fake_host: FakeHost, kind: TaskKind, where: str
) -> None:
    begin, knobs = UNATTENDED[kind]
    with FakeDaemon(fake_host, (kind, where)) as daemon:
        scene = Scene(daemon, fake_host)
        answer = scene.post("/v2/snapshots", tag=TAG, recipe=str(fake_host.recipe(knobs=knobs)))
        assert answer.status_code == 201
        scene.sandbox = scene.fork()

        begin(scene)

        scene.works()
    assert daemon.status == EXIT_STOPPED
    (line,) = scene.crash()
    assert f'task="{kind} ' in line
    assert "request=" in line


def reset(scene: Scene) -> None:
    scene.arm()
    scene.post(f"/v2/sandboxes/{scene.sandbox}/reset")


def own(scene: Scene) -> None:
    scene.arm()
    scene.post("/v2/sandboxes", snapshot_tag=TAG)


def resolve(scene: Scene) -> None:
    scene.arm()
    scene.post("/v2/sandboxes", snapshot_tag=TAG, network="internet")


VITAL: list[Any] = [(TaskKind.OWNER, "start", own), (TaskKind.OWNER, "middle", reset)]
VITAL += [(TaskKind.JOURNAL, "middle", own)]  # it begins with the daemon
VITAL += [
    pytest.param(TaskKind.RESOLVER, "start", resolve, marks=pytest.mark.needs("root", "tun", "nft"))
]


@pytest.mark.parametrize(("kind", "where", "begin"), VITAL)
def test_a_vital_task_that_crashes_ends_the_daemon_and_the_next_one_adopts_all(
    fake_host: FakeHost, kind: TaskKind, where: str, begin: Callable[[Scene], None]
) -> None:
    with FakeDaemon(fake_host, (kind, where)) as daemon:
        scene = Scene(daemon, fake_host)
        scene.prepare()
        others = [scene.fork() for _ in range(3)]
        waiting = threading.Thread(target=wait_in, args=[daemon.url, scene.sandbox])
        waiting.start()

        with contextlib.suppress(httpx.TransportError):  # it may end before it can answer
            begin(scene)

        assert daemon.until_ended() == EXIT_RESTART
        waiting.join(20)
        assert not waiting.is_alive()
    (line,) = scene.crash()
    assert f'task="{kind} ' in line
    assert "CRITICAL forkd.service.supervision: the service cannot go on" in daemon.log.read_text()

    with FakeDaemon(fake_host) as daemon:
        scene.daemon = daemon
        assert {scene.sandbox, *others} <= set(scene.sandboxes())
        scene.works()
    assert daemon.status == EXIT_STOPPED


def wait_in(url: str, sandbox: str) -> None:
    """Run a program that does not end, over a connection of its own, until that breaks."""
    transport = httpx.HTTPTransport(uds=url.removeprefix("unix://"), verify=False)
    path = f"/v2/sandboxes/{sandbox}/exec"
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.Client(transport=transport, base_url="http://forkd", timeout=60) as http,
    ):
        http.post(path, json={"args": ["forever"]})


def test_a_daemon_that_is_told_to_stop_while_it_opens_its_host_closes_all_of_it(
    fake_host: FakeHost,
) -> None:
    with FakeDaemon(fake_host, told_early=True) as daemon:
        assert daemon.until_ended() == EXIT_STOPPED

    assert "told to stop" in daemon.log.read_text()
    assert not daemon.socket.exists()


def test_a_service_manager_is_told_when_the_daemon_listens(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_host.folder / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(20)

        with FakeDaemon(fake_host) as daemon:
            assert manager.recv(100) == b"READY=1"
            assert daemon.http.get("/readyz").status_code == 200
    assert daemon.status == EXIT_STOPPED


def test_a_service_manager_that_watches_is_told_again_and_again_and_a_hang_says_where_it_is(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = fake_host.folder / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    monkeypatch.setenv("WATCHDOG_USEC", "90000")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(20)

        with FakeDaemon(fake_host) as daemon:
            assert [manager.recv(100) for _ in range(4)] == [b"READY=1", *[b"WATCHDOG=1"] * 3]
            os.kill(daemon.pid, signal.SIGABRT)
            assert daemon.until_ended() == -signal.SIGABRT
    said = capfd.readouterr().err
    assert "Fatal Python error: Aborted" in said
    assert "in run_forever" in said


def test_every_kind_of_task_crashes_in_a_test() -> None:
    vital = {TaskKind.OWNER, TaskKind.JOURNAL, TaskKind.RESOLVER, TaskKind.PROXY}
    # test_network_names.py, test_secrets.py and test_network_slots.py, where there are networks
    # and tests/unit/test_service_clock.py
    elsewhere = {TaskKind.QUESTION, TaskKind.PROXIED, TaskKind.FILL, TaskKind.CLOCK}
    assert {*CONCERNED, *UNATTENDED, *vital, *elsewhere} == set(TaskKind)
