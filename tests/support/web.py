"""A web server that keeps what is PUT, with entity tags, redirects and a token, on this host."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Web:
    """What the server has, and what it should do wrong.

    Attributes:
        files: By path.
        seen: Each request: its method, path and token.
        token: Wanted of every request, if set.
        redirects: From one path to a URL.
        others: What others store as the index just before each of ours.
        cut: Answers break off after so many bytes.
    """

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    seen: list[tuple[str, str, str | None]] = field(default_factory=list)
    token: str | None = None
    redirects: dict[str, str] = field(default_factory=dict)
    others: list[bytes] = field(default_factory=list)
    cut: int | None = None

    def url(self, path: str = "/packs/") -> str:
        return f"http://127.0.0.1:{self.port}{path}"


def _tag(data: bytes) -> str:
    return f'"{sha256(data).hexdigest()}"'


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, web: Web) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.web = web
        web.port = self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self._refused():
            return
        data = self.server.web.files.get(self.path)
        if self.path in self.server.web.redirects:
            self._answer(302, location=self.server.web.redirects[self.path])
        elif data is None:
            self._answer(404)
        elif self.server.web.cut is not None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: self.server.web.cut])
            self.close_connection = True
        else:
            self._answer(200, data, etag=_tag(data))

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self._refused():
            return
        if self.path.endswith("index.json") and self.server.web.others:
            self.server.web.files[self.path] = self.server.web.others.pop(0)
        here = self.server.web.files.get(self.path)
        wanted, none = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        changed = wanted is not None and (here is None or _tag(here) != wanted)
        if changed or (none == "*" and here is not None):
            self._answer(412)
            return
        self.server.web.files[self.path] = data
        self._answer(201)

    def _refused(self) -> bool:
        given = self.headers.get("Authorization")
        self.server.web.seen.append((self.command, self.path, given))
        if self.server.web.token is None or given == f"Bearer {self.server.web.token}":
            return False
        self._answer(403)
        return True

    def _answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """A web server on a port of its own."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Web()
    server = _Server(made)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()
