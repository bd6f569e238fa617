"""Answers longer than a moment: events as lines of JSON, and bytes as they come.

Both take over an iterator of the service and close it whatever happens, so that a client which
goes away ends what it asked for: a bake is undone, a file of a guest is closed.

An error before the first piece is an ordinary error answer, with its status.  Afterwards the
status has been sent: a stream of events ends with an `error` event, and a stream of bytes breaks
off without its last chunk, which every HTTP client notices.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Protocol, TypeVar

from pydantic_core import to_json
from starlette.responses import Response

from forkd.daemon.errors import JSON, body_of
from forkd.errors import EngineError, ForkdError
from forkd.model.output import PIECE_BYTES
from forkd.wire.v2 import ErrorEvent

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterable,
        AsyncIterator,
        Callable,
        Iterator,
        Mapping,
    )

    from pydantic import BaseModel
    from starlette.types import Receive, Scope, Send

    from forkd.model.output import Kept

log = logging.getLogger(__name__)

NDJSON = "application/x-ndjson"
"""Media type of a stream of events: one JSON object a line."""

T = TypeVar("T")


class Closable(Protocol):
    """What somebody must close."""

    async def aclose(self) -> None:
        """Let go; idempotent."""
        ...


class Stream(Response):
    """An answer sent piece by piece; `owned` is closed when it ends, however it ends."""

    def __init__(
        self,
        pieces: AsyncIterable[bytes],
        *,
        owned: Closable,
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._pieces = pieces
        self._owned = owned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, until the pieces end; cancelled if the client goes away."""
        del scope, receive
        try:
            await self._send_all(send)
        except ForkdError as error:
            log.warning("answer broken off", extra={"error": str(error)})
        finally:
            await self._owned.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def events(source: AsyncGenerator[T, None], render: Callable[[T], BaseModel]) -> Response:
    """Return `source` as a stream of events.

    Waits for the first event, so that what is refused at once is refused with a status.

    Raises:
        ForkdError: Whatever `source` raises before its first event.
    """
    first = await anext(source)
    return Stream(_lines(first, source, render), owned=source, media_type=NDJSON)


async def _lines(
    first: T, rest: AsyncIterator[T], render: Callable[[T], BaseModel]
) -> AsyncIterator[bytes]:
    try:
        yield _line(render(first))
        async for event in rest:
            yield _line(render(event))
    except ForkdError as error:
        log.warning("operation failed: %s (%s)", error, error.code)
        yield _line(ErrorEvent(**body_of(error).model_dump()))


def _line(event: BaseModel) -> bytes:
    return event.model_dump_json().encode() + b"\n"


def with_outputs(result: BaseModel, outputs: Mapping[str, Kept]) -> Response:
    """Return `result` as an answer, with what was kept for the members that `outputs` names.

    Long outputs are decoded and encoded while they are sent: as JSON they can be six times as long.
    """
    texts = _texts(result, outputs)
    if sum(map(len, outputs.values())) <= PIECE_BYTES:
        return Response("".join(texts), media_type=JSON)
    return _Long(texts, media_type=JSON)


def _texts(result: BaseModel, outputs: Mapping[str, Kept]) -> Iterator[str]:
    opening = "{"
    for name, value in result.model_dump().items():
        yield f"{opening}{json.dumps(name)}:"
        opening = ","
        if name in outputs:
            yield '"'
            yield from (
                json.dumps(each, ensure_ascii=False)[1:-1] for each in outputs[name].pieces()
            )
            yield '"'
        else:
            yield to_json(value, inf_nan_mode="null").decode()
    yield "}"


class _Long(Response):
    """An answer that is made while it is sent."""

    def __init__(self, texts: Iterator[str], *, media_type: str) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        del scope, receive
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        for text in self._texts:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def last(source: AsyncGenerator[object, None], kind: type[T]) -> T:
    """Return the result that ends `source`, for a client that asked for no stream."""
    result = None
    async with contextlib.aclosing(source):
        async for event in source:
            result = event
    if not isinstance(result, kind):
        raise EngineError("the operation ended without a result")
    return result


@contextlib.contextmanager
def first_error() -> Iterator[None]:
    """Raise the first of the errors of a task group, as if there had been no group."""
    try:
        yield
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
