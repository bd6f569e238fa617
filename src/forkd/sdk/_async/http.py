"""Requests to the daemon: answers checked and typed, errors raised as what they were."""

from __future__ import annotations

import json
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter, ValidationError

from forkd.errors import ClientClosed, ForkdError, NotFound, TransportError
from forkd.sdk._defaults import async_default
from forkd.sdk._endpoint import discover
from forkd.sdk._errors import from_answer, from_body
from forkd.sdk._retries import REPEATABLE, RETRIES_MAX, Retries
from forkd.sdk._transport import (
    answer_nothing,
    async_http,
    async_pause,
    async_socket,
    timeout,
    transport_errors,
)
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

JSON = "application/json"

ERROR_STATUS = 400

KEY_HEADER = "Idempotency-Key"
"""The header by which the daemon knows a request that is made again."""

NEXT_HEADER = "Forkd-Next"
"""The header that has the `after` of a list's next part."""

_NULL = TypeAdapter(None)


class AsyncHttp:
    """A connection pool to one daemon."""

    local_files = True
    """Whether a recipe or an image may be a path of this host, to be uploaded; else what is given
    is a name that the daemon knows."""

    def __init__(self, endpoint: Endpoint, retries_max: int = RETRIES_MAX) -> None:
        self.endpoint = endpoint
        self._retries_max = retries_max
        self._client = async_http(endpoint)

    @classmethod
    async def default(cls) -> AsyncHttp:
        """Return the connections that are there for who opened none."""
        return await async_default(cls, discover())

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
        creates: bool = False,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
    ) -> T:
        """Return the answer to one request as a `kind`; `_retries` says what is tried again.

        Args:
            kind: What the answer is.
            method: The request's.
            path: The request's.
            body: The request's, as JSON.
            query: Members of the query that are not None.
            content: The request's body, if it is no JSON.
            content_type: The media type of `content`.
            creates: Whether it makes something, which the daemon must not make twice.
            timeout_s: Time that the answer may take; None: for ever.

        Raises:
            ForkdError: What the daemon answered instead.
            TransportError: It did not answer, or not in a way we understand.
        """
        answer = await self._answered(
            method,
            path,
            repeatable=creates or method in REPEATABLE,
            resendable=content is None or isinstance(content, bytes),
            params=_given(query),
            headers=_headers(content_type if body is None else JSON, creates=creates),
            content=content if body is None else _encoded(body),
            timeout=timeout(timeout_s),
        )
        return _parsed(kind, answer)

    async def page(
        self, kind: TypeAdapter[T], path: str, query: Mapping[str, Any]
    ) -> tuple[T, str | None]:
        """Return a part of a list, and the `after` of the next part; None if there is none."""
        answer = await self._answered(
            "GET", path, params=_given(query), timeout=timeout(ANSWER_TIMEOUT_S)
        )
        return _parsed(kind, answer), answer.headers.get(NEXT_HEADER)

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

        The request has a key: where the connection breaks, the daemon goes on with what it does,
        and tells a second request the same events from the first one on.

        Raises:
            ForkdError: What the operation ended with instead.
        """
        headers = {**_headers(JSON, creates=True), "Accept": NDJSON}
        parts = {"content": _encoded(body), "headers": headers, "timeout": timeout(None)}
        retries = Retries(self._retries_max, repeatable=True)
        steps = _Steps(on_progress)
        while True:
            async with self._streamed("POST", path, **parts) as answer:
                try:
                    with transport_errors(self.endpoint):
                        return await _followed(answer, result, steps)
                except TransportError as error:
                    pause_s = retries.pause_s(error)
                    if pause_s is None:
                        raise
            await async_pause(pause_s)

    @asynccontextmanager
    async def streamed(
        self,
        path: str,
        query: Mapping[str, Any] | None = None,
        *,
        silence_s: float | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Open an answer whose bytes are read as they come, with pauses of `silence_s` at most."""
        async with self._streamed(
            "GET", path, params=_given(query), timeout=timeout(silence_s)
        ) as answer:
            yield answer

    @staticmethod
    def quoted(name: str) -> str:
        """Return a name as one segment of a path, whatever is in it."""
        return quote(name, safe="")

    async def socket(self, path: str) -> AsyncSocket:
        """Open a WebSocket."""
        self._check_open()
        return await async_socket(self.endpoint, path)

    def _check_open(self) -> None:
        if self._client.is_closed:
            raise ClientClosed(
                f"this client of {self.endpoint.url} is closed; make the call before that, or with "
                "another client"
            )

    def _request(self, method: str, path: str, **parts: Any) -> httpx.Request:  # noqa: ANN401 - httpx's
        """Return a request, if the client may still make one.

        Raises:
            ClientClosed: It was closed.
        """
        self._check_open()
        return self._client.build_request(method, path, **parts)

    async def _answered(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool = True,
        resendable: bool = True,
        stream: bool = False,
        **parts: Any,  # noqa: ANN401 - httpx's
    ) -> httpx.Response:
        """Return the answer to a request, which is made again as `_retries` says.

        Raises:
            ForkdError: What the daemon answered instead.
        """
        retries = Retries(self._retries_max, repeatable=repeatable, resendable=resendable)
        while True:
            request = self._request(method, path, **parts)
            try:
                with transport_errors(self.endpoint):
                    answer = await self._client.send(request, stream=stream)
                    if answer.status_code < ERROR_STATUS:
                        return answer
                    content = await answer.aread()
                raise from_answer(answer.status_code, content)
            except ForkdError as error:
                if method == "DELETE" and retries.lost and isinstance(error, NotFound):
                    return answer_nothing(request)  # the attempt whose answer was lost did it
                pause_s = retries.pause_s(error)
                if pause_s is None:
                    raise
            await async_pause(pause_s)

    @asynccontextmanager
    async def _streamed(
        self,
        method: str,
        path: str,
        **parts: Any,  # noqa: ANN401 - those of `_answered`
    ) -> AsyncIterator[httpx.Response]:
        answer = await self._answered(method, path, stream=True, **parts)
        with transport_errors(self.endpoint):
            try:
                yield answer
            finally:
                await answer.aclose()


class _Steps:
    """The steps of an operation: each is told once, however often they come from the first on."""

    def __init__(self, on_progress: Callable[[v2.ProgressEvent], object] | None) -> None:
        self._on_progress = on_progress
        self._told = 0
        self._come = 0

    def begin(self) -> None:
        self._come = 0

    def take(self, step: v2.ProgressEvent) -> None:
        self._come += 1
        if self._come <= self._told:
            return
        self._told = self._come
        if self._on_progress is not None:
            self._on_progress(step)


async def _followed(answer: httpx.Response, result: type[T], steps: _Steps) -> T:
    """Return the result at the end of a stream of events."""
    steps.begin()
    async for line in answer.aiter_lines():
        found = _event(line, result)
        if isinstance(found, result):
            return found
        if isinstance(found, v2.ProgressEvent):
            steps.take(found)
    raise TransportError("the stream of events ended before its result")


def _given(query: Mapping[str, Any] | None) -> dict[str, str | list[str]]:
    """Return the members of `query` that are not None, as the daemon reads them."""
    return {
        key: value if isinstance(value, str | list) else json.dumps(value)
        for key, value in (query or {}).items()
        if value is not None
    }


def _encoded(body: BaseModel) -> bytes:
    return body.model_dump_json(exclude_unset=True).encode()


def new_key() -> str:
    """Return a key that no other request has."""
    return uuid.uuid4().hex


def _headers(content_type: str | None, *, creates: bool) -> dict[str, str]:
    headers = {} if content_type is None else {"Content-Type": content_type}
    if creates:
        headers[KEY_HEADER] = new_key()
    return headers


def _parsed(kind: type[T] | TypeAdapter[T], answer: httpx.Response) -> T:
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
