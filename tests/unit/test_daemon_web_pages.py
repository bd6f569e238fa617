"""A web page in the browser of somebody who may use the daemon gets nowhere with it.

What a browser sends is written out here byte by byte: a form and a simple fetch, which it sends
without asking the daemon first, the question that it asks before anything else, a WebSocket, and
all of these from a page whose name the page's owner pointed at this very address (DNS rebinding).
None of them can have the token: a browser adds cookies and passwords by itself, and no token.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.support.daemon import TOKEN

if TYPE_CHECKING:
    from tests.support.daemon import RunningDaemon

EVIL = "http://evil.example"
REBOUND = "http://rebound.example"

FORK = b'{"snapshot_tag": "warm", "n": 1}'


def say(daemon: RunningDaemon, request: str) -> tuple[int, dict[str, str], str]:
    """Send bytes to the TCP address; return the status, the headers and the code of the error."""
    parts = urlsplit(daemon.tcp_url)
    request = request.replace("DAEMON", parts.netloc).replace("PORT", str(parts.port))
    body = FORK if "POST" in request else b""
    lines = [*request.strip().splitlines(), f"Content-Length: {len(body)}", "", ""]
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), 10) as client:
        client.sendall("\r\n".join(lines).encode() + body)
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, said = answer.partition(b"\r\n\r\n")
    first, *rest = head.decode().splitlines()
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
    return int(first.split()[1]), headers, json.loads(said)["code"]


FORM = """
POST /v2/snapshots:gc HTTP/1.1
Host: {host}
Origin: {origin}
Content-Type: application/x-www-form-urlencoded
Cookie: token=guess
"""

SIMPLE_FETCH = """
POST /v2/sandboxes HTTP/1.1
Host: {host}
Origin: {origin}
Content-Type: text/plain;charset=UTF-8
Sec-Fetch-Mode: no-cors
"""

PREFLIGHT = """
OPTIONS /v2/sandboxes HTTP/1.1
Host: {host}
Origin: {origin}
Access-Control-Request-Method: POST
Access-Control-Request-Headers: authorization,content-type
"""

WEBSOCKET = """
GET /v2/sandboxes/sb-aaaaaaaaaaaaaaaaaaaaaaaaaa/exec/stream HTTP/1.1
Host: {host}
Origin: {origin}
Upgrade: websocket
Connection: Upgrade
Sec-WebSocket-Version: 13
Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==
"""

IMAGE = """
GET /v2/sandboxes HTTP/1.1
Host: {host}
Sec-Fetch-Mode: no-cors
"""

WITH_ORIGIN = {
    "form": FORM,
    "simple fetch": SIMPLE_FETCH,
    "preflight": PREFLIGHT,
    "websocket": WEBSOCKET,
}
ALL = {**WITH_ORIGIN, "image": IMAGE}


@pytest.mark.parametrize("request_", WITH_ORIGIN.values(), ids=WITH_ORIGIN)
@pytest.mark.parametrize("allowed", ["", f"Authorization: Bearer {TOKEN}"], ids=["", "even with"])
@pytest.mark.parametrize(
    ("host", "origin"),
    [("DAEMON", EVIL), ("localhost:PORT", "null"), ("rebound.example:PORT", REBOUND)],
    ids=["another page", "sandboxed frame", "rebound name"],
)
def test_a_web_page_gets_nowhere(
    daemon: RunningDaemon, request_: str, allowed: str, host: str, origin: str
) -> None:
    status, headers, code = say(daemon, request_.format(host=host, origin=origin) + allowed)

    assert (status, code) == (403, "forbidden")
    assert not [each for each in headers if each.startswith("access-control-")]
    assert daemon.service.running == {}


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL)
def test_a_page_of_a_name_that_is_served_gets_nowhere_without_the_token(
    daemon: RunningDaemon, request_: str
) -> None:
    """Such as that of another program, on another port of this host."""
    said = request_.format(host="localhost:PORT", origin="http://localhost:3000")

    status, headers, code = say(daemon, said)

    assert (status, code) == (401, "denied")
    assert not [each for each in headers if each.startswith("access-control-")]


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL)
@pytest.mark.parametrize("allowed", ["", f"Authorization: Bearer {TOKEN}"], ids=["", "even with"])
def test_a_rebound_name_is_refused_though_its_page_is_of_the_same_origin(
    daemon: RunningDaemon, request_: str, allowed: str
) -> None:
    said = request_.format(host="rebound.example:PORT", origin=REBOUND)
    without_origin = said.replace(f"Origin: {REBOUND}\n", "")

    assert say(daemon, said + allowed)[::2] == (403, "forbidden")
    assert say(daemon, without_origin + allowed)[::2] == (403, "forbidden")
    assert daemon.service.running == {}


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_a_rebound_page_does_not_even_learn_that_the_daemon_lives(
    daemon: RunningDaemon, path: str
) -> None:
    request = f"GET {path} HTTP/1.1\nHost: rebound.example"

    assert say(daemon, request)[0] == 403
