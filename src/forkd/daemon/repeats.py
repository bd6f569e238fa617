"""Requests that create, done once however often they come: the header `Idempotency-Key`.

Which answers are final, and so kept: those that say what was made, and those that say that the
request cannot be done as written.  Not kept are those after which a repetition may succeed: 401,
403, 408, 413, 429, and everything from 500.
"""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import TYPE_CHECKING

from starlette.responses import Response

from forkd.daemon.errors import render, status_of_code
from forkd.daemon.peers import CALLER, HELD
from forkd.errors import ForkdError, InvalidRequest
from forkd.limits import IDEMPOTENCY_KEY_CHARS_MAX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import ExitStack

    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send

    from forkd.model.caller import Caller
    from forkd.service.answers import Answer, Answers

HEADER = "Idempotency-Key"

REPLAYED = "Idempotency-Replayed"
"""Header of an answer to a request that was done before."""

NDJSON = "application/x-ndjson"

_KEY = re.compile(rf"[!-~]{{1,{IDEMPOTENCY_KEY_CHARS_MAX}}}")
_SERVER_ERROR = 500
_CLIENT_ERROR = 400
_NOT_FINAL = frozenset({401, 403, 408, 413, 429})


def key_of(request: Request) -> str | None:
    """Return the key of a request; None if it has none.

    Raises:
        InvalidRequest: It is no key.
    """
    key = request.headers.get(HEADER)
    if key is not None and _KEY.fullmatch(key) is None:
        raise InvalidRequest(
            f"{HEADER} must be 1 to {IDEMPOTENCY_KEY_CHARS_MAX} visible ASCII characters, not "
            f"{key[:80]!r}",
            field=HEADER,
        )
    return key


def refuse(path: str) -> InvalidRequest:
    """Return the error of a request with a key on a route that creates nothing."""
    return InvalidRequest(
        f"{HEADER} goes with requests that create something, and {path} does not", field=HEADER
    )


async def once(
    request: Request, key: str, handle: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Return the answer to a request that is done unless it has been.

    Raises:
        ForkdError: As `Answers.once`.
        Exception: What `handle` raises that is no error of ours.
    """
    answers: Answers = request.app.state.host.answers
    caller: Caller = request.scope[CALLER]
    held: ExitStack = request.scope[HELD]
    body = await request.body()
    streamed = NDJSON in request.headers.get("accept", "")
    url = request.url
    digest = sha256(f"{url.path}?{url.query}\n{streamed}\n".encode() + body).digest()

    async def work(answer: Answer) -> bytes | None:
        try:
            response = await handle(request)
        except ForkdError as error:
            response = render(error)
        recorder = _Recorder(answer)
        await response(request.scope, _nothing, recorder.send)
        return recorder.final()

    answer = await answers.once(caller, key, digest, work)
    held.enter_context(answer.followed())  # until the request is over, or its client has gone
    await answer.begun()
    return _Followed(answer)


async def _nothing() -> Message:
    """Say that the client has gone: whatever is recorded has none."""
    return {"type": "http.disconnect"}


class _Recorder:
    """Takes what a response sends."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._streamed = False
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [
                (name.decode(), value.decode("latin-1")) for name, value in message["headers"]
            ]
            self._streamed = ("content-type", NDJSON) in headers
            self._answer.start(message["status"], tuple(headers))
            return
        piece = bytes(message.get("body", b""))
        if not piece:
            return
        if self._streamed and _event(piece).get("event") == "progress":
            self._answer.add(piece)
            return
        self._answer.hold(piece)
        self._body = piece if self._streamed else self._body + piece

    def final(self) -> bytes | None:
        """Return the body that is kept; None if the answer is not final."""
        status = self._answer.status
        if self._streamed:
            last = _event(self._body)
            if last.get("event") == "error":
                status = status_of_code(str(last.get("code")))
        return self._body if status < _SERVER_ERROR and status not in _NOT_FINAL else None


def _event(line: bytes) -> dict[str, object]:
    found = json.loads(line or b"{}")
    return found if isinstance(found, dict) else {}


class _Followed(Response):
    """Sends an answer as it comes."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        del scope, receive
        answer = self._answer
        headers = [(name.encode(), value.encode("latin-1")) for name, value in answer.headers]
        if answer.replayed:
            headers.append((REPLAYED.lower().encode(), b"true"))
        start = {"status": answer.status, "headers": headers}
        await send({"type": "http.response.start", **start})
        async for piece in answer.pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
