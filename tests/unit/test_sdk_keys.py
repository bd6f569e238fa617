"""What creates is done once, however often the answer is lost on the way."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from forkd import AsyncClient
from forkd.errors import IdempotencyMismatch
from forkd.sdk import _retries
from tests.support.cutting import cutting
from tests.support.daemon import TOKEN
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from tests.support.daemon import RunningDaemon

CREATES = 100

AT_ONCE = 32


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_retries, "PAUSE_S_MIN", 0.001)


class Plan:
    """Dice that show what a test says, and then nothing that loses an answer."""

    def __init__(self, *shown: float) -> None:
        self.shown = list(shown)

    def random(self) -> float:
        return self.shown.pop(0) if self.shown else 1.0


async def test_creates_of_whose_answers_one_in_five_is_lost_are_done_once(
    daemon: RunningDaemon,
) -> None:
    daemon.service.stored = some_snapshots("warm")
    places = asyncio.Semaphore(AT_ONCE)
    async with (
        cutting(daemon.tcp_url, random.Random(7), lost_share=0.2) as proxy,  # noqa: S311 - a test
        AsyncClient(proxy.url, token=TOKEN, retries_max=20) as client,
    ):

        async def create() -> str:
            async with places:
                return (await client.fork("warm"))[0].id

        made = await asyncio.gather(*(create() for _ in range(CREATES)))

    assert proxy.lost > CREATES / 10
    assert 0 < proxy.early < proxy.lost
    assert len(set(made)) == CREATES
    assert set(made) == set(daemon.service.running)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95])
async def test_a_bake_whose_answer_breaks_is_done_once(daemon: RunningDaemon, share: float) -> None:
    steps: list[str] = []
    async with (
        cutting(daemon.tcp_url, Plan(1.0, 0.0, share), lost_share=0.1) as proxy,
        AsyncClient(proxy.url, token=TOKEN) as client,
    ):
        made = await client.snapshots.create(
            "new", "/recipes/good", on_progress=lambda step: steps.append(step.stage)
        )

    assert proxy.lost == 1
    assert (made.tag, list(daemon.service.stored)) == ("new", ["new"])
    assert steps == ["boot", "warm"][: len(steps)]  # of one that has ended no steps are kept


async def test_another_request_under_the_same_key_is_refused(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.service.stored = some_snapshots("warm", "other")
    monkeypatch.setattr("forkd.sdk._async.http.new_key", lambda: "the-same")
    async with AsyncClient(daemon.url) as client:
        (first,) = await client.fork("warm")
        (again,) = await client.fork("warm")
        with pytest.raises(IdempotencyMismatch):
            await client.fork("other")

    assert first.id == again.id
    assert list(daemon.service.running) == [first.id]
