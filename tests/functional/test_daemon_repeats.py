"""Requests with an Idempotency-Key to the real service, over the fake VMM."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from forkd import AsyncClient
from forkd.model.ids import SandboxId
from forkd.store.answers import kept
from tests.support.cutting_proxy import cutting_proxy
from tests.support.served_host import served_host
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.served_host import Served
    from tests.support.service_host import FakeHost

KEY = {"Idempotency-Key": "k1"}


async def fork(served: Served) -> tuple[list[str], bool]:
    body = {"snapshot_tag": TAG, "n": 2}
    answer = await served.http.post("/v2/sandboxes", json=body, headers=KEY)
    assert answer.status_code == 201, answer.text
    return [each["id"] for each in answer.json()], "Idempotency-Replayed" in answer.headers


async def test_an_answer_outlives_the_daemon(fake_host: FakeHost) -> None:
    async with served_host(fake_host) as served:
        made, again = await fork(served)
        assert not again

    async with served_host(fake_host, baked=True) as served:
        assert await fork(served) == (made, True)
        assert sorted(await served.sandboxes()) == sorted(made)
        other = await served.http.post("/v2/sandboxes", json={"snapshot_tag": TAG}, headers=KEY)
        assert other.json()["code"] == "idempotency_mismatch"
        for each in made:
            await served.http.delete(f"/v2/sandboxes/{each}")
        assert await fork(served) == (made, True)
        assert await served.sandboxes() == []


@pytest.mark.soak(only=True)
async def test_creates_with_lost_answers_leave_what_was_asked_for(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    async with served_host(fake_host) as served:
        upstream = served.url.removeprefix("unix://")
        async with (
            cutting_proxy(upstream, str(tmp_path / "p"), every=10) as proxy,
            AsyncClient(f"unix://{proxy.path}", retries_max=8) as client,
        ):
            at_once = asyncio.Semaphore(4)

            async def create(_: int) -> list[str]:
                async with at_once:
                    return [each.id for each in await client.fork(TAG, 10)]

            made = [each for ids in await asyncio.gather(*map(create, range(100))) for each in ids]
        assert proxy.lost >= 10
        assert len(made) == 1_000
        assert sorted(await served.sandboxes()) == sorted(made)
        assert len(await served.service.sandboxes.records.ask(kept)) == 100
        await served.service.sandboxes.delete_all(map(SandboxId, made))
        assert fake_host.left_over() == []
