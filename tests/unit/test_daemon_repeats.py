"""A request with an Idempotency-Key is done once, however often it comes."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from forkd import AsyncClient
from forkd.errors import CapacityError
from forkd.limits import IDEMPOTENCY_KEY_CHARS_MAX
from forkd.service import answers
from tests.support.cutting_proxy import cutting_proxy
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.daemon import RunningDaemon

FORK = {"snapshot_tag": "warm"}
NDJSON = {"Accept": "application/x-ndjson"}


@pytest.fixture
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    daemon.service.stored = some_snapshots("warm")
    transport = httpx.HTTPTransport(uds=daemon.url.removeprefix("unix://"), verify=False)
    with httpx.Client(transport=transport, base_url="http://forkd") as client:
        yield client


def keyed(key: str = "k1", **more: str) -> dict[str, str]:
    return {"Idempotency-Key": key, **more}


def fork(http: httpx.Client, key: str = "k1", **members: object) -> httpx.Response:
    return http.post("/v2/sandboxes", json=FORK | members, headers=keyed(key))


def count(http: httpx.Client) -> int:
    return len(http.get("/v2/sandboxes").json())


def test_the_same_request_gets_the_first_answer_again(http: httpx.Client) -> None:
    first, second = fork(http), fork(http)

    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert count(http) == 1
    assert "Idempotency-Replayed" not in first.headers
    assert second.headers["Idempotency-Replayed"] == "true"
    assert second.headers["Server-Timing"] == first.headers["Server-Timing"]
    assert second.headers["X-Request-Id"] != first.headers["X-Request-Id"]
    assert fork(http, "k2").json() != first.json()
    assert count(http) == 2


def test_another_request_with_the_key_is_refused_and_does_nothing(http: httpx.Client) -> None:
    fork(http)

    branch = f"/v2/sandboxes/{http.get('/v2/sandboxes').json()[0]['id']}/branch"
    for refused in (
        fork(http, n=2),
        http.post("/v2/sandboxes?x=1", json=FORK, headers=keyed()),
        http.post(branch, json={"n": 1}, headers=keyed()),
    ):
        assert refused.status_code == 422
        assert refused.json()["code"] == "idempotency_mismatch"
        assert refused.json()["field"] == "Idempotency-Key"
    assert count(http) == 1


@pytest.mark.parametrize("key", ["", "a b", "k" * (IDEMPOTENCY_KEY_CHARS_MAX + 1), "k\x7f"])
def test_what_is_no_key_is_refused(http: httpx.Client, key: str) -> None:
    refused = fork(http, key)

    assert (refused.status_code, refused.json()["field"]) == (400, "Idempotency-Key")
    assert count(http) == 0
    assert fork(http, "k" * IDEMPOTENCY_KEY_CHARS_MAX).status_code == 201


def test_a_key_is_refused_where_nothing_is_created(http: httpx.Client) -> None:
    (made,) = fork(http).json()

    path = f"/v2/sandboxes/{made['id']}/exec"
    refused = http.post(path, json={"args": ["echo"]}, headers=keyed("k2"))
    assert (refused.status_code, refused.json()["field"]) == (400, "Idempotency-Key")
    assert http.get(f"/v2/sandboxes/{made['id']}", headers=keyed("k2")).status_code == 200


def test_an_error_that_is_final_is_given_again_and_another_is_not(
    http: httpx.Client, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = fork(http, "k1", snapshot_tag="none")
    daemon.service.stored |= some_snapshots("none")
    again = fork(http, "k1", snapshot_tag="none")
    assert (missing.status_code, again.status_code) == (404, 404)
    assert again.headers["Idempotency-Replayed"] == "true"

    async def full(*_: object) -> None:
        raise CapacityError("no room", retry_after_s=1)

    with monkeypatch.context() as changed:
        changed.setattr(daemon.service.sandboxes, "fork", full)
        assert fork(http, "k2").status_code == 503
    assert fork(http, "k2").status_code == 201
    assert count(http) == 1


def test_requests_that_come_together_are_done_once(
    http: httpx.Client, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go = asyncio.Event(), asyncio.Event()
    _hold_back(daemon, monkeypatch, entered, go)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(fork, http, "k1") for _ in range(3)]
        daemon.wait_for(lambda: entered)
        assert fork(http, "k1", n=2).status_code == 422
        daemon.loop.call_soon_threadsafe(go.set)
        found = [each.result() for each in asked]

    assert {each.status_code for each in found} == {201}
    assert len({each.text for each in found}) == 1
    assert count(http) == 1


def test_a_client_that_left_gets_the_answer_when_it_comes_again(
    http: httpx.Client, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go = asyncio.Event(), asyncio.Event()
    _hold_back(daemon, monkeypatch, entered, go)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v2/sandboxes", json=FORK, headers=keyed(), timeout=0.2)
    daemon.wait_for(lambda: entered)
    daemon.loop.call_soon_threadsafe(go.set)

    assert fork(http).status_code == 201
    assert count(http) == 1


def test_what_nobody_comes_for_again_is_ended_and_undone(
    http: httpx.Client, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "ABANDONED_S", 0.05)
    body = {"tag": "later", "recipe": "hangs"}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v2/snapshots", json=body, headers=keyed(), timeout=0.2)

    daemon.wait_for(lambda: daemon.service.bake_undone)
    assert http.post("/v2/snapshots", json=body | {"recipe": "good"}, headers=keyed()).is_success


@pytest.mark.parametrize(("recipe", "last"), [("good", "snapshot"), ("fails", "error")])
def test_of_a_stream_the_last_event_is_given_again(
    http: httpx.Client, recipe: str, last: str
) -> None:
    def bake() -> tuple[list[dict[str, Any]], httpx.Headers]:
        body = {"tag": "made", "recipe": recipe}
        answer = http.post("/v2/snapshots", json=body, headers=keyed(**NDJSON))
        return [json.loads(line) for line in answer.text.splitlines()], answer.headers

    first, _ = bake()
    assert [each["event"] for each in first[:-1]] == ["progress"] * len(first[:-1])
    assert first[-1]["event"] == last
    assert len(first) > 1
    again, headers = bake()
    assert again == first[-1:]
    assert headers["content-type"] == "application/x-ndjson"
    body = {"tag": "made", "recipe": recipe}
    plain = http.post("/v2/snapshots", json=body, headers=keyed())
    assert plain.json()["code"] == "idempotency_mismatch"


def test_a_token_is_made_once_and_its_secret_is_not_in_what_is_kept(
    http: httpx.Client, daemon: RunningDaemon
) -> None:
    body = {"name": "ci", "scopes": ["read"]}
    first = http.post("/v2/tokens", json=body, headers=keyed())
    assert http.post("/v2/tokens", json=body, headers=keyed()).json() == first.json()
    (sealed,) = daemon.service.answers.written.values()
    assert first.json()["token"].encode() not in sealed


async def test_a_thousand_creates_with_lost_answers_make_a_thousand_sandboxes(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    daemon.service.stored = some_snapshots("warm")
    upstream = daemon.url.removeprefix("unix://")
    async with (
        cutting_proxy(upstream, str(tmp_path / "p"), every=10) as proxy,
        # With four retries one create in a hundred thousand fails for good; here are a thousand.
        AsyncClient(f"unix://{proxy.path}", retries_max=8) as client,
    ):

        async def create(number: int) -> str:
            async with at_once:
                (made,) = await client.fork("warm", labels={"number": str(number)})
                return made.id

        at_once = asyncio.Semaphore(16)
        made = await asyncio.gather(*map(create, range(1_000)))

    assert proxy.lost >= 100
    running = daemon.service.running
    assert set(made) == set(running)
    assert len(running) == 1_000
    assert {each.sandbox.labels["number"] for each in running.values()} == set(
        map(str, range(1_000))
    )


def _hold_back(
    daemon: RunningDaemon,
    monkeypatch: pytest.MonkeyPatch,
    entered: asyncio.Event,
    go: asyncio.Event,
) -> None:
    real = daemon.service.sandboxes.fork

    async def fork(*args: Any) -> Any:  # noqa: ANN401 - as the one that it stands for
        entered.set()
        await go.wait()
        return await real(*args)

    monkeypatch.setattr(daemon.service.sandboxes, "fork", fork)
