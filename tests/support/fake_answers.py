"""The answers that the host in memory keeps by their keys."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from forkd.service.answers import Answers
from forkd.service.supervision import Task
from tests.support.no_records import no_records

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from forkd.store.answers import KeptAnswer


class FakeAnswers(Answers):
    """Answers in memory, made by tasks that nobody supervises."""

    def __init__(self) -> None:
        super().__init__(no_records(), _run)
        self.written: dict[bytes, bytes] = {}

    async def _read(self, id_: bytes) -> bytes | None:
        return self.written.get(id_)

    async def _write(self, answer: KeptAnswer, sealed: bytes, forgotten: list[bytes]) -> None:
        self.written[answer.id] = sealed
        for each in forgotten:
            self.written.pop(each, None)


def _run(work: Coroutine[object, object, None], name: str) -> Task[None]:
    return Task(asyncio.create_task(work, name=name))
