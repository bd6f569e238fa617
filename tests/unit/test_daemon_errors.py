"""Whatever a client sends, what is refused is an `ErrorBody`, with the right status, and no 5xx."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.daemon.clients import HEADER_BYTES_MAX
from forkd.limits import BODY_BYTES_MAX
from forkd.wire.v2 import ErrorBody
from tests.support.daemon import TOKEN
from tests.support.raw_http import WEBSOCKET, RawClient

if TYPE_CHECKING:
    from tests.support.daemon import RunningDaemon

SANDBOX = "/v2/sandboxes/sb-aaaaaaaaaaaaaaaaaaaaaaaaaa"
HOST = "Host: localhost\n"
JSON = f"{HOST}Content-Type: application/json\n"
SOCKET = WEBSOCKET.format(path=f"{SANDBOX}/exec/stream", more="")


INVALID, REQUEST, MISSING = "invalid_request", "request", "not_found"


def get(path: str) -> str:
    return f"GET {path} HTTP/1.1\n{HOST}\n"


def post(body: bytes, path: str = "/v2/sandboxes", more: str = JSON) -> bytes:
    head = f"POST {path} HTTP/1.1\n{more}Content-Length: {len(body)}\n\n"
    return head.replace("\n", "\r\n").encode() + body


def chunked(body: bytes) -> bytes:
    head = f"POST /v2/sandboxes HTTP/1.1\n{JSON}Transfer-Encoding: chunked\n\n"
    return head.replace("\n", "\r\n").encode() + body


CASES: dict[str, tuple[str | bytes, int, str]] = {
    # What no route has.
    "no such path": (get("/nothing"), 404, MISSING),
    "a path that is no text": (get("/v2/%ff%fe"), 404, MISSING),
    "a path with a NUL": (get("/v2/snapshots/%00/info"), 400, INVALID),
    "not this method": (f"PATCH /v2/snapshots HTTP/1.1\n{HOST}\n", 405, REQUEST),
    "a method of its own": (f"FROB /v2/snapshots HTTP/1.1\n{HOST}\n", 405, REQUEST),
    "TRACE": (f"TRACE /v2/snapshots HTTP/1.1\n{HOST}\n", 405, REQUEST),
    "a proxy's request": (f"CONNECT example.com:443 HTTP/1.1\n{HOST}\n", 404, MISSING),
    "every path": (f"OPTIONS * HTTP/1.1\n{HOST}\n", 404, MISSING),
    "an exec stream that is no WebSocket": (get(f"{SANDBOX}/exec/stream"), 404, MISSING),
    # Queries.
    "a parameter that is none": (get("/v2/sandboxes?x=1"), 400, INVALID),
    "a parameter that is no text": (
        get("/v2/sandboxes?snapshot_tag=%ff"), 400, INVALID
    ),
    "a parameter that is missing": (get(f"{SANDBOX}/files"), 400, INVALID),
    "a number without end": (
        get(f"{SANDBOX}/files?path=/x&length={'9' * 5000}"), 400, INVALID
    ),
    # Bodies.
    "no body": (post(b""), 400, INVALID),
    "no JSON": (post(b"{"), 400, INVALID),
    "JSON of another shape": (post(b"[]"), 400, INVALID),
    "no UTF-8": (post(b'{"snapshot_tag": "\xff"}'), 400, INVALID),
    "half a surrogate": (post(b'{"snapshot_tag": "\\ud800"}'), 400, INVALID),
    "a NUL": (post(b'{"snapshot_tag": "a\\u0000b"}'), 400, INVALID),
    "nested too deep": (post(b"[" * 100_000), 400, INVALID),
    "a number too long": (post(b'{"n": ' + b"9" * 10_000 + b"}"), 400, INVALID),
    "infinity": (post(b'{"snapshot_tag": "a", "ttl_secs": 1e999}'), 400, INVALID),
    "not a number": (post(b'{"snapshot_tag": "a", "ttl_secs": NaN}'), 400, INVALID),
    "a member twice": (post(b'{"n": 1, "n": 2}'), 400, INVALID),
    "another type": (post(b"{}", more=f"{HOST}Content-Type: text/plain\n"), 400, INVALID),
    "no type": (post(b"{}", more=HOST), 400, INVALID),
    "too long": (post(b" " * (BODY_BYTES_MAX + 1)), 413, INVALID),
    "too long in pieces": (
        chunked((b"10000\r\n" + b" " * 65536 + b"\r\n") * 33 + b"0\r\n\r\n"), 413, INVALID
    ),
    # HTTP itself.
    "no HTTP": ("hello\n\n", 400, REQUEST),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), 400, REQUEST),
    "no host": ("GET /healthz HTTP/1.1\n\n", 400, REQUEST),
    "two hosts": (f"GET /healthz HTTP/1.1\n{HOST}{HOST}\n", 400, REQUEST),
    "a header that is none": (f"GET /healthz HTTP/1.1\n{HOST}no colon\n\n", 400, REQUEST),
    "a header with a NUL": (f"GET /healthz HTTP/1.1\n{HOST}x: a\0b\n\n", 400, REQUEST),
    "a header too long": (
        f"GET /healthz HTTP/1.1\n{HOST}x: {'x' * HEADER_BYTES_MAX}\n\n", 431, REQUEST
    ),
    "a line too long": (get(f"/{'x' * HEADER_BYTES_MAX}"), 431, REQUEST),
    "a length that is none": (
        f"POST /v2/sandboxes HTTP/1.1\n{JSON}Content-Length: -1\n\n", 400, REQUEST
    ),
    "a length without end": (
        f"POST /v2/sandboxes HTTP/1.1\n{JSON}Content-Length: {'9' * 5000}\n\n", 400, REQUEST
    ),
    "two lengths": (
        f"POST /v2/sandboxes HTTP/1.1\n{JSON}Content-Length: 1\nContent-Length: 2\n\n", 400, REQUEST
    ),
    "a chunk that is none": (chunked(b"zz\r\n"), 400, REQUEST),
    "a chunk without end": (chunked(b"2\r\n{}junk\r\n"), 400, REQUEST),
    "a coding that is none": (
        f"POST /v2/sandboxes HTTP/1.1\n{JSON}Transfer-Encoding: frob\n\n", 501, REQUEST
    ),
    # WebSockets.
    "a WebSocket nowhere": (WEBSOCKET.format(path="/nothing", more=""), 404, MISSING),
    "a WebSocket where there is none": (
        WEBSOCKET.format(path="/v2/sandboxes", more=""), 404, MISSING
    ),
    "a WebSocket without a key": (SOCKET.replace("Sec-WebSocket-Key", "X"), 400, REQUEST),
    "a WebSocket with a bad key": (SOCKET.replace("dGhlIHNhbXBsZSBub25jZQ==", "x"), 400, REQUEST),
    "a WebSocket of another version": (SOCKET.replace("Version: 13", "Version: 12"), 400, REQUEST),
    "a WebSocket by POST": (SOCKET.replace("GET", "POST"), 405, REQUEST),
    "a WebSocket with many headers": (
        SOCKET.replace("Connection", "".join(f"x{n}: 1\n" for n in range(200)) + "Connection"), 400,
        REQUEST,
    ),
}  # fmt: skip
"""What is sent; the status and the code of the answer."""


@pytest.mark.parametrize(("request_", "status", "code"), CASES.values(), ids=CASES)
async def test_what_is_refused_is_an_error_body_with_the_right_status(
    daemon: RunningDaemon, request_: str | bytes, status: int, code: str
) -> None:
    async with RawClient(daemon.url) as client:
        client.say(request_)
        answer = await client.answer()

    assert answer.headers["content-type"] == "application/json"
    said = ErrorBody.model_validate_json(answer.body, extra="forbid")
    assert (answer.status, said.code) == (status, code)
    assert said.error


def test_nothing_that_a_client_sends_is_our_fault() -> None:
    """A coding that no RFC has is 501, "not implemented", as RFC 9112 asks."""
    assert {status for _, status, _ in CASES.values() if status >= 500} == {501}


@pytest.mark.parametrize(("request_", "status", "code"), CASES.values(), ids=CASES)
async def test_over_tcp_the_same_is_refused_and_nothing_before_the_token(
    daemon: RunningDaemon, request_: str | bytes, status: int, code: str
) -> None:
    async with RawClient(daemon.tcp_url) as client:
        client.say(request_)
        answer = await client.answer()

    said = ErrorBody.model_validate_json(answer.body, extra="forbid")
    assert (answer.status, said.code) in {(status, code), (401, "denied")}
    assert TOKEN not in answer.body.decode()
