"""Long answers that are whole in memory take so much of it and no more, however slowly read."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from forkd.daemon.clients import UNIX
from forkd.daemon.requests import PIECE_BYTES_MAX, Requests
from forkd.limits import ANSWERS_BYTES_MAX
from forkd.telemetry.telemetry import Telemetry
from tests.support.callers import CALLER

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from forkd.model.caller import Caller


async def who(_: Scope, __: str) -> Caller:
    return CALLER


class Client:
    """Asks for an answer of a length, and reads when it is told to."""

    def __init__(self, length: int, method: str = "GET") -> None:
        self.length, self.method = length, method
        self.reads = asyncio.Event()
        self.begun = asyncio.Event()
        self.messages: list[Message] = []

    def scope(self) -> dict[str, Any]:
        """Return its request."""
        path = f"/{self.length}"
        known: dict[str, Any] = {"type": "http", "method": self.method, "headers": []}
        return {**known, "path": path, "raw_path": path.encode(), "query_string": b""}

    async def receive(self) -> Message:
        """Stay."""
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        """Take a message."""
        self.messages.append(message)
        self.begun.set()
        await self.reads.wait()

    @property
    def status(self) -> int:
        """That of its answer."""
        status: int = self.messages[0]["status"]
        return status

    def body(self) -> bytes:
        """Return what it was sent."""
        return b"".join(each.get("body", b"") for each in self.messages)


async def app(scope: Scope, _: Receive, send: Send) -> None:
    """Answer as many bytes as the path says."""
    length = int(scope["path"].strip("/"))
    header = (b"content-length", str(length).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [header]})
    await send({"type": "http.response.body", "body": b"x" * min(length, 100)})


async def test_a_long_answer_beyond_what_all_may_have_is_refused_until_another_was_read() -> None:
    requests = Requests(app, who, UNIX, Telemetry())
    slow, refused, short = Client(ANSWERS_BYTES_MAX), Client(PIECE_BYTES_MAX + 1), Client(10)
    changed = Client(PIECE_BYTES_MAX + 1, "POST")
    for each in (refused, short, changed):
        each.reads.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(requests(slow.scope(), slow.receive, slow.send))
        await slow.begun.wait()
        await requests(refused.scope(), refused.receive, refused.send)
        await requests(short.scope(), short.receive, short.send)
        await requests(changed.scope(), changed.receive, changed.send)
        slow.reads.set()
    later = Client(ANSWERS_BYTES_MAX)
    later.reads.set()
    await requests(later.scope(), later.receive, later.send)

    assert (slow.status, refused.status, short.status, later.status) == (200, 503, 200, 200)
    assert changed.status == 200  # its client must hear of what it has made
    said = json.loads(refused.body())
    assert (said["code"], said["context"]["limit"]) == ("capacity", ANSWERS_BYTES_MAX)
    assert said["context"]["used"] == ANSWERS_BYTES_MAX
    assert (b"retry-after", b"1") in refused.messages[0]["headers"]
    assert len([each for each in refused.messages if each["type"] == "http.response.start"]) == 1
