"""A server of HTTP/1.1 over TLS that records what arrives, and answers by the path it is asked for.

/echo      every header of the request, as headers of the answer and in its body
/body      the body of the request, in pieces
/zipped    the value of Authorization, compressed whatever the client accepts
/nothing   ends the connection without an answer
/early     an answer before the body of the request was read
/switch    another protocol, in which it says everything back
/last      an answer after which the connection ends
else       "ok"
"""

from __future__ import annotations

import contextlib
import gzip
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from tests.support.outside import DEADLINE_S, listening

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.namespaces import Namespace


@dataclass(frozen=True)
class Arrived:
    """A request."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        found = [value for key, value in self.headers if key.lower() == name.lower()]
        return found[0] if found else None


@dataclass
class Recorder:
    """What arrived: requests, connections, and everything as it came."""

    requests: list[Arrived] = field(default_factory=list)
    connections: int = 0
    names: list[str | None] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = DEADLINE_S
    disable_nagle_algorithm = True
    recorder: Recorder

    def setup(self) -> None:
        super().setup()
        self.recorder.connections += 1

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, *_: object) -> None:
        return

    def _serve(self) -> None:
        path = self.path
        if path == "/early":
            self._say(b"early", close=True)
        body = self._body()
        self.recorder.requests.append(
            Arrived(self.command, path, tuple(self.headers.items()), body)
        )
        if path == "/early":
            return
        if path == "/nothing":
            self.close_connection = True
        elif path == "/echo":
            said = "\n".join(f"{name}: {value}" for name, value in self.headers.items())
            shown = {f"X-Echo-{name}": value for name, value in self.headers.items()}
            self._say(said.encode(), shown)
        elif path == "/body":
            self._say_pieces(body)
        elif path == "/zipped":
            zipped = gzip.compress((self.headers["Authorization"] or "").encode())
            self._say(zipped, {"Content-Encoding": "gzip"})
        elif path == "/switch":
            self._switch()
        else:
            self._say(b"ok", close=path == "/last")

    do_GET = do_POST = do_PUT = do_HEAD = _serve  # noqa: N815 - names of http.server

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _say(
        self, body: bytes, headers: dict[str, str] | None = None, *, close: bool = False
    ) -> None:
        self.send_response(200)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if close:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _say_pieces(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(body), 1_000):
            piece = body[start : start + 1_000]
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _switch(self) -> None:
        self.send_response(101)
        self.send_header("Upgrade", "echo")
        self.send_header("Connection", "Upgrade")
        self.end_headers()
        self.close_connection = True
        while data := self.rfile.read1(4_096):
            self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True

    def __init__(self, context: ssl.SSLContext, sock: Any, handler: type[_Handler]) -> None:  # noqa: ANN401 - a socket
        super().__init__(sock.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock
        self._context = context

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - of socketserver
        request.settimeout(DEADLINE_S)
        with contextlib.suppress(OSError):
            wrapped = self._context.wrap_socket(request, server_side=True)
            super().finish_request(wrapped, client_address)
            with contextlib.suppress(OSError):
                wrapped.unwrap()
            wrapped.close()

    def handle_error(self, *_: object) -> None:
        return


@contextlib.contextmanager
def recording(
    namespace: Namespace, address: str, port: int, certificate: tuple[Path, Path]
) -> Iterator[Recorder]:
    """Serve at an address of a namespace within the block."""
    recorder = Recorder()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.set_alpn_protocols(["h2", "http/1.1"])

    def note(_: object, name: str | None, __: object) -> None:
        recorder.names.append(name)

    context.sni_callback = note
    handler = type("Handler", (_Handler,), {"recorder": recorder})
    server = _Server(context, namespace.run(lambda: listening(address, port)), handler)
    server.socket.settimeout(None)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield recorder
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
