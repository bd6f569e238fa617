"""A handler's crash is logged, whatever its client does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from forkd.daemon.clients import UNIX
from forkd.daemon.errors import install
from forkd.daemon.requests import Requests
from forkd.model.caller import local_caller
from forkd.telemetry.telemetry import Telemetry

if TYPE_CHECKING:
    import pytest
    from starlette.types import Message, Scope

    from forkd.model.caller import Caller


async def by_nobody(_: Scope, request_id: str) -> Caller:
    return local_caller(request_id)


async def test_a_crash_is_logged_though_the_client_leaves_with_its_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is raised again behind the answer, where the handler may have been cancelled by then."""
    app = FastAPI()
    install(app)

    @app.get("/")
    async def crash() -> None:
        raise RuntimeError("a bug of ours")

    answered = asyncio.Event()
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            answered.set()
            await asyncio.Event().wait()  # it waits for a client to read that has left

    async def receive() -> Message:
        await answered.wait()
        return {"type": "http.disconnect"}

    scope: dict[str, Any] = {
        "type": "http", "method": "GET", "path": "/", "raw_path": b"/", "query_string": b"",
        "headers": [], "http_version": "1.1", "scheme": "http", "root_path": "", "state": {},
    }  # fmt: skip
    await Requests(app, by_nobody, UNIX, Telemetry())(scope, receive, send)

    assert sent[0]["status"] == 500
    (record,) = [each for each in caplog.records if each.getMessage() == "request crashed"]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)
