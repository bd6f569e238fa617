"""What requests take is limited, and shared by tenants: places, memory for bodies and answers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from forkd.daemon.bodies import Room
from forkd.daemon.clients import EVENTS_PATH, TCP, UNIX
from forkd.daemon.requests import PIECE_BYTES_MAX, Requests
from forkd.errors import CapacityError
from forkd.limits import ANSWERS_BYTES_MAX
from forkd.telemetry.telemetry import Telemetry
from tests.support.callers import CALLER, tenant

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


@pytest.mark.parametrize(
    ("kind", "path"), [("http", "/v2/sandboxes"), ("websocket", "/socket"), ("http", EVENTS_PATH)]
)
async def test_a_tenant_that_takes_all_it_can_leaves_half_to_others(kind: str, path: str) -> None:
    go, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def wait(_: Scope, __: Receive, send: Send) -> None:
        begun.release()
        await go.wait()
        if kind == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.http.response.start", "status": 200, "headers": []})

    async def by_header(scope: Scope, _: str) -> Caller:
        return tenant(scope["tenant"])

    most = 8
    limits = replace(TCP, requests_max=most, websockets_max=most, events_max=most)
    requests = Requests(wait, by_header, limits, Telemetry())

    async def ask(name: str) -> Client:
        client = Client(0)
        client.reads.set()
        asked = {**client.scope(), "type": kind, "path": path, "tenant": name}
        await requests(asked, client.receive, client.send)
        return client

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        red = [group.create_task(ask("red")) for _ in range(most // 2)]
        for _ in red:
            await begun.acquire()
        refused = await ask("red")
        blue = group.create_task(ask("blue"))
        await begun.acquire()
        go.set()
    assert refused.status == 503
    assert [each.result().status for each in (*red, blue)] == [200] * (most // 2 + 1)


def test_a_tenants_bodies_leave_half_of_the_memory_to_others() -> None:
    room = Room("bodies of requests", 100)
    room.take(tenant("red"), 50)

    with pytest.raises(CapacityError, match="those of tenant red have 50: 1 more") as refused:
        room.take(tenant("red"), 1)
    room.take(tenant("blue"), 25)
    with pytest.raises(CapacityError, match="those have 75: 26 more"):
        room.take(CALLER, 26)

    assert refused.value.context["used"] == 50  # nothing is told of what others have
    room.give_back(tenant("red"), 50)
    assert room.used_bytes == 25
