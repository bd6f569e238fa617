"""Requests to the daemon: answers checked and typed, errors raised as what they were."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter, ValidationError

from forkd.errors import TransportError
from forkd.sdk._errors import from_answer, from_body
from forkd.sdk._transport import async_http, async_socket, timeout, transport_errors
from forkd.wire import v2

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping

    import httpx

    from forkd.sdk._endpoint import Endpoint
    from forkd.sdk._transport import AsyncSocket

T = TypeVar("T")

ANSWER_TIMEOUT_S = 120.0
"""Time a short call may take; calls that wait for work in a guest say how long themselves."""

NDJSON = "application/x-ndjson"

ERROR_STATUS = 400

_NULL = TypeAdapter(None)


class AsyncHttp:
    """A connection pool to one daemon."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._client = async_http(endpoint)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def call(  # noqa: PLR0913 - a request has that many parts
        self,
        kind: type[T] | TypeAdapter[T],
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        query: Mapping[str, Any] | None = None,
        content: AsyncIterable[bytes] | bytes | None = None,
        content_type: str | None = None,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
    ) -> T:
        """Return the answer to one request as a `kind`.

        Raises:
            ForkdError: What the daemon answered instead.
            TransportError: It did not answer, or not in a way we understand.
        """
        kind_of_body = content_type if body is None else "application/json"
        with transport_errors(self.endpoint):
            answer = await self._client.request(
                method,
                path,
                params=_given(query),
                headers=None if kind_of_body is None else {"Content-Type": kind_of_body},
                content=content if body is None else _encoded(body),
                timeout=timeout(timeout_s),
            )
        return _parsed(kind, answer)

    async def send(self, method: str, path: str, **options: Any) -> None:  # noqa: ANN401 - `call`'s
        """Make a request whose answer is empty; as `call`."""
        await self.call(_NULL, method, path, **options)

    async def events(
        self,
        path: str,
        body: BaseModel,
        result: type[T],
        on_progress: Callable[[v2.ProgressEvent], object] | None,
    ) -> T:
        """Follow a stream of events to its result, handing every step to `on_progress`.

        Raises:
            ForkdError: What the operation ended with instead.
        """
        request = self._client.build_request(
            "POST",
            path,
            content=_encoded(body),
            headers={"Content-Type": "application/json", "Accept": NDJSON},
            timeout=timeout(None),
        )
        async with self._streamed(request) as answer:
            async for line in answer.aiter_lines():
                found = _event(line, result)
                if isinstance(found, result):
                    return found
                if on_progress is not None and isinstance(found, v2.ProgressEvent):
                    on_progress(found)
        raise TransportError("the stream of events ended before its result")

    @asynccontextmanager
    async def streamed(
        self,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        silence_s: float | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Open an answer whose bytes are read as they come, with pauses of `silence_s` at most."""
        request = self._client.build_request(
            "GET", path, params=_given(query), timeout=timeout(silence_s)
        )
        async with self._streamed(request) as answer:
            yield answer

    @staticmethod
    def quoted(name: str) -> str:
        """Return a name as one segment of a path, whatever is in it."""
        return quote(name, safe="")

    async def socket(self, path: str) -> AsyncSocket:
        """Open a WebSocket."""
        return await async_socket(self.endpoint, path)

    @asynccontextmanager
    async def _streamed(self, request: httpx.Request) -> AsyncIterator[httpx.Response]:
        with transport_errors(self.endpoint):
            answer = await self._client.send(request, stream=True)
            try:
                if answer.status_code >= ERROR_STATUS:
                    raise from_answer(answer.status_code, await answer.aread())
                yield answer
            finally:
                await answer.aclose()


def _given(query: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the members of `query` that are not None, as the daemon reads them."""
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in (query or {}).items()
        if value is not None
    }


def _encoded(body: BaseModel) -> bytes:
    return body.model_dump_json(exclude_unset=True).encode()


def _parsed(kind: type[T] | TypeAdapter[T], answer: httpx.Response) -> T:
    if answer.status_code >= ERROR_STATUS:
        raise from_answer(answer.status_code, answer.content)
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return adapter.validate_json(answer.content or b"null")
    except ValidationError as error:
        raise TransportError(f"this daemon's answer makes no sense to us: {error}") from error


def _event(line: str, result: type[T]) -> T | v2.ProgressEvent | None:
    """Return the event in `line`: a step, the result, or None for one we do not know."""
    try:
        said = json.loads(line)
        match said["event"]:
            case "progress":
                return v2.ProgressEvent.model_validate(said)
            case "error":
                failure = v2.ErrorEvent.model_validate(said)
            case name if name == _name_of(result):
                return TypeAdapter(result).validate_python(said)
            case _:
                return None
    except (ValueError, LookupError, TypeError) as error:
        raise TransportError(f"an event makes no sense to us: {line[:200]!r}") from error
    raise from_body(failure)


def _name_of(result: type[object]) -> object:
    fields: dict[str, Any] = getattr(result, "model_fields", {})
    return fields["event"].default
