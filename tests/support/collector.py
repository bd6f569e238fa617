"""Receives traces as a collector does: OTLP over HTTP, on a port of its own."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """A span as it was received."""

    trace: str
    id: str
    parent: str
    name: str
    attributes: dict[str, Any]
    failed: bool


class Collector:
    """Where traces are sent to; a context manager."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        seen = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces":
                    seen.extend(_read(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Collector]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def tree(self, trace: str) -> list[str]:
        """Return the spans of a trace, each below its parent, indented and in order of name."""
        below: defaultdict[str, list[SeenSpan]] = defaultdict(list)
        known = {each.id for each in self.spans}
        for each in self.spans:
            if each.trace == trace:
                below[each.parent if each.parent in known else ""].append(each)

        def lines(parent: str, depth: int) -> Iterator[str]:
            for each in sorted(below[parent], key=lambda span: span.name):
                yield "  " * depth + each.name
                yield from lines(each.id, depth + 1)

        return list(lines("", 0))


def _read(body: bytes) -> Iterator[SeenSpan]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                said = {each.key: each.value for each in span.attributes}
                yield SeenSpan(
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    name=span.name,
                    attributes={
                        key: value.string_value or value.int_value for key, value in said.items()
                    },
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                )
