"""A daemon under many clients, and after many sandboxes, is what it was before.

The daemon is a process of its own over the fake VMM; the last test has real machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from forkd import Client
from forkd.engine.guest import IDLE_CHANNELS_MAX
from forkd.host import proc
from tests.support.crowd import Crowd
from tests.support.fake_daemon import FakeDaemon
from tests.support.memory import Held
from tests.support.raw_http import Answer, RawClient
from tests.support.real_daemon import running_daemon
from tests.support.real_host import REAL, RECIPE
from tests.support.real_host import TAG as REAL_TAG
from tests.support.service_host import TAG, UNTIL_DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.bakes import Bakes
    from tests.support.service_host import FakeHost
    from tests.support.soak import Soak

pytestmark = [pytest.mark.soak, pytest.mark.timeout(120)]

VISITORS = 200
REQUESTS = 500
WARMUP_REQUESTS = 100
FORKS_EVERY = 10
"""Of how many requests at once one is a fork: over a fake VMM each is a process."""

ACT_EVERY = 25
"""After how many answers each of the clients that want nothing does something more."""

GROWTH_MAX = 0.05
"""By which part of itself a daemon's private memory may grow after its warm-up."""

SAMPLES = 20
"""How often a daemon is looked at while sandboxes come and go."""


@pytest.fixture
def daemon(fake_host: FakeHost) -> Iterator[FakeDaemon]:
    """A daemon with a snapshot that has been forked."""
    proc.raise_open_files_limit()
    with FakeDaemon(fake_host) as made:
        body = {"tag": TAG, "recipe": str(fake_host.recipe())}
        assert made.http.post("/v2/snapshots", json=body).status_code == 201
        cycle(made)
        yield made


def cycle(daemon: FakeDaemon) -> None:
    """Fork a sandbox and end it."""
    answer = daemon.http.post("/v2/sandboxes", json={"snapshot_tag": TAG})
    assert answer.status_code == 201, answer.text
    assert daemon.http.delete(f"/v2/sandboxes/{answer.json()[0]['id']}").status_code == 204


async def ask(daemon: FakeDaemon, method: str, path: str, body: object = None) -> Answer:
    """Ask over a connection of its own, whose end is not announced."""
    data = b"" if body is None else json.dumps(body).encode()
    async with RawClient(daemon.url) as client:
        client.say(
            f"{method} {path} HTTP/1.1\r\nHost: forkd\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        return await client.answer()


async def request(daemon: FakeDaemon, number: int, sandbox: str) -> None:
    """Make a request that has to work."""
    if number % FORKS_EVERY == 0:
        made = await ask(daemon, "POST", "/v2/sandboxes", {"snapshot_tag": TAG})
        assert made.status == 201, made
        made = await ask(daemon, "DELETE", f"/v2/sandboxes/{made.json()[0]['id']}")
        assert made.status == 204, made
    elif number % 2:
        path, body = f"/v2/sandboxes/{sandbox}/eval", {"code": "answer"}
        told = await ask(daemon, "POST", path, body)
        while told.status == 503:  # so many wait for their turn already
            assert told.json()["code"] == "busy", told
            told = await ask(daemon, "POST", path, body)
        assert (told.status, told.json()["value"]) == (200, 42)
    else:
        assert (await ask(daemon, "GET", "/v2/sandboxes")).status == 200


async def rush(daemon: FakeDaemon, sandbox: str, requests: int = REQUESTS) -> None:
    """Have a crowd there while so many requests are made at once, each of which is answered."""
    crowd = Crowd(daemon.socket, VISITORS)
    try:
        await crowd.act()
        asking = [request(daemon, number, sandbox) for number in range(requests)]
        for number, answered in enumerate(asyncio.as_completed(asking)):
            await answered
            if number % ACT_EVERY == 0:
                await crowd.act()
        assert daemon.http.get("/readyz").status_code == 200
    finally:
        crowd.leave()


async def fill_idle_channels(daemon: FakeDaemon, sandbox: str) -> None:
    """Have the daemon keep as many idle connections to a guest as it ever does."""

    code = f"import threading; barrier = threading.Barrier({IDLE_CHANNELS_MAX})"
    told = await ask(daemon, "POST", f"/v2/sandboxes/{sandbox}/eval", {"code": code})
    assert (told.status, told.json()["error"]) == (200, None), told

    async def meet() -> None:
        told = await ask(daemon, "POST", f"/v2/sandboxes/{sandbox}/exec", {"args": ["meet"]})
        assert (told.status, told.json()["exit_code"]) == (200, 0), told

    # Each answers only when all are there, so that none can have the connection of another.
    await asyncio.gather(*(meet() for _ in range(IDLE_CHANNELS_MAX)))


@pytest.mark.soak(only=True)
async def test_a_crowd_and_many_requests_at_once_are_answered_and_leave_nothing(
    daemon: FakeDaemon, soak: Soak, tell: Callable[[str], None]
) -> None:
    sandbox = daemon.http.post("/v2/sandboxes", json={"snapshot_tag": TAG}).json()[0]["id"]
    tasks = len(await daemon.tasks())
    await rush(daemon, sandbox, WARMUP_REQUESTS)  # what is made once, such as threads, is made
    await fill_idle_channels(daemon, sandbox)
    # Connections that ended before this request was sent are closed when it is answered.
    assert daemon.http.get("/readyz").status_code == 200
    async with asyncio.timeout(UNTIL_DEADLINE_S):
        while len(await daemon.tasks()) > tasks:
            pass
    before = await examined(daemon)

    for _ in range(soak.count(1, 20)):
        await rush(daemon, sandbox)

        await until_as(daemon, before)
    tell(f"after {VISITORS} clients and {REQUESTS} requests at once: {before}")
    assert (
        before["tasks"] <= tasks
    )  # the first count may have those of requests that had just ended
    assert before["sandboxes"] == [sandbox]
    assert daemon.http.delete(f"/v2/sandboxes/{sandbox}").status_code == 204


async def examined(daemon: FakeDaemon) -> dict[str, Any]:
    """Return all that a crowd could leave."""
    return {
        "descriptors": Held.by(daemon.pid).descriptors,
        "tasks": len(await daemon.tasks()),
        "sandboxes": [each["id"] for each in daemon.http.get("/v2/sandboxes").json()],
        "machines": daemon.host.vmm_processes(),
        "left_over": daemon.host.left_over(),
    }


async def until_as(daemon: FakeDaemon, before: dict[str, Any]) -> None:
    """Return once a daemon and its host are as they were: connections end a moment later."""
    after: dict[str, Any] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(UNTIL_DEADLINE_S):
            while after != before:
                after = await examined(daemon)
    assert after == before


def endure(
    run: Callable[[], None], pid: int, warmup: int, times: int, tell: Callable[[str], None]
) -> None:
    """Check that what a daemon holds is the same however often `run` was done."""
    for _ in range(warmup):
        run()
    samples = [Held.by(pid)]
    for number in range(1, times + 1):
        run()
        if number % max(1, times // SAMPLES) == 0:
            samples.append(settled(pid, samples[0].descriptors))
    first, most = samples[0], max(samples, key=lambda each: each.private_bytes)
    growth = most.private_bytes / first.private_bytes - 1
    tell(f"{times} times after {warmup}: {growth:.1%} more at most; first {first}")
    tell(f"last {samples[-1]}; KiB {[each.private_bytes >> 10 for each in samples]}")
    assert growth <= GROWTH_MAX
    assert max(each.descriptors for each in samples) == first.descriptors


def settled(pid: int, descriptors: int) -> Held:
    """Return what a daemon holds, once it has no more descriptors, or in the end."""
    deadline_s = time.monotonic() + UNTIL_DEADLINE_S
    while (held := Held.by(pid)).descriptors > descriptors:
        if time.monotonic() > deadline_s:
            break
    return held


def test_sandboxes_come_and_go_and_the_daemon_does_not_grow(
    daemon: FakeDaemon, soak: Soak, tell: Callable[[str], None]
) -> None:
    endure(lambda: cycle(daemon), daemon.pid, soak.count(60, 500), soak.count(40, 10_000), tell)


def fork_and_kill(client: Client) -> None:
    client.fork(REAL_TAG)[0].kill()


@REAL
@pytest.mark.soak(only=True)  # whatever the machines are, it is the daemon that must not grow
@pytest.mark.timeout(600)
def test_machines_come_and_go_and_the_daemon_does_not_grow(
    bakes: Bakes, tell: Callable[[str], None]
) -> None:
    with running_daemon(bakes.of(RECIPE)) as daemon, Client(daemon.url) as client:
        endure(
            lambda: fork_and_kill(client),
            daemon.pid,
            warmup=300,
            times=3_000,
            tell=tell,
        )
