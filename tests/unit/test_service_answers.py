"""Which answers are kept, for how long, and for whom."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from forkd.errors import CapacityError, IdempotencyMismatch, StoreError
from forkd.limits import IDEMPOTENCY_KEPT_S
from forkd.service import answers
from tests.support.callers import CALLER, tenant
from tests.support.fake_answers import FakeAnswers

if TYPE_CHECKING:
    from forkd.model.caller import Caller
    from forkd.service.answers import Answer, Answers


async def ask(
    kept: Answers, key: str, body: bytes = b"x", caller: Caller = CALLER, digest: bytes = b"d"
) -> tuple[bytes, bool]:
    """Return the answer, and whether the work was done for it."""
    done = False

    async def work(answer: Answer) -> bytes:
        nonlocal done
        done = True
        answer.start(201, (("a", "b"),))
        answer.hold(body)
        return body

    answer = await kept.once(caller, key, digest, work)
    with answer.followed():
        await answer.begun()
        return b"".join([each async for each in answer.pieces()]), done


async def test_an_answer_is_its_tenants() -> None:
    kept = FakeAnswers()

    assert await ask(kept, "k", b"mine") == (b"mine", True)
    assert await ask(kept, "k", b"theirs", tenant("other"), b"e") == (b"theirs", True)
    assert await ask(kept, "k") == (b"mine", False)
    with pytest.raises(IdempotencyMismatch):
        await ask(kept, "k", digest=b"e")


async def test_an_answer_is_kept_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, now_s = FakeAnswers(), 1_000.0
    monkeypatch.setattr(kept, "_clock_s", lambda: now_s)
    await ask(kept, "k")

    now_s += IDEMPOTENCY_KEPT_S - 1
    assert await ask(kept, "k") == (b"x", False)
    now_s += 1
    assert await ask(kept, "k") == (b"x", True)
    assert len(kept.written) == 1


@pytest.mark.parametrize(
    ("limit", "most"), [("IDEMPOTENCY_KEYS_MAX", 3), ("IDEMPOTENCY_BYTES_MAX", 3 * 60)]
)
async def test_the_oldest_answers_are_forgotten_for_new_ones(
    limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, limit, most)
    kept = FakeAnswers()
    await ask(kept, "theirs", caller=tenant("other"))
    for number in range(4):
        await ask(kept, f"k{number}")

    assert len(kept.written) == 4
    assert await ask(kept, "theirs", caller=tenant("other")) == (b"x", False)
    assert await ask(kept, "k3") == (b"x", False)
    assert await ask(kept, "k1") == (b"x", False)
    assert await ask(kept, "k0") == (b"x", True)


async def test_an_answer_longer_than_all_may_be_is_given_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "IDEMPOTENCY_BYTES_MAX", 10)
    kept = FakeAnswers()

    assert await ask(kept, "k") == (b"x", True)
    assert kept.written == {}


async def test_what_cannot_be_kept_is_answered_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*_: object) -> None:
        raise StoreError("the disk is gone")

    kept = FakeAnswers()
    monkeypatch.setattr(kept, "_write", fail)
    assert await ask(kept, "k") == (b"x", True)
    assert await ask(kept, "k") == (b"x", True)


async def test_only_so_many_are_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "IDEMPOTENT_AT_ONCE_MAX", 1)
    kept, go = FakeAnswers(), asyncio.Event()

    async def work(answer: Answer) -> None:
        await go.wait()
        answer.start(503, ())

    first = await kept.once(CALLER, "k", b"d", work)
    with pytest.raises(CapacityError):
        await ask(kept, "other")
    assert await kept.once(CALLER, "k", b"d", work) is first
    go.set()
    await first.begun()
    assert [each async for each in first.pieces()] == []
    assert await ask(kept, "other") == (b"x", True)


async def test_what_crashes_is_raised_to_all_who_wait_and_is_done_again() -> None:
    kept = FakeAnswers()

    async def crash(_: Answer) -> None:
        raise ZeroDivisionError

    answer = await kept.once(CALLER, "k", b"d", crash)
    for _ in range(2):
        with answer.followed(), pytest.raises(ZeroDivisionError):
            await answer.begun()
    assert await ask(kept, "k") == (b"x", True)
