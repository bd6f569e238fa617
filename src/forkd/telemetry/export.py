"""Export spans by OTLP over HTTP, with OpenTelemetry's SDK; loaded only if that is asked for.

A thread of the SDK's sends them in batches.  If the other end is slow or gone, spans are dropped,
and nobody waits.  The SDK's own variables, such as `OTEL_TRACES_SAMPLER`, hold as well.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from forkd.errors import ForkdError
from forkd.installed import VERSION

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from forkd.telemetry.tracing import Attributes

EXPORT_TIMEOUT_S = 5
"""Longest that one batch of spans may take to be sent; the daemon's end may wait for the last."""

_current: ContextVar[Span | None] = ContextVar("current_span", default=None)


class Exporter:
    """Makes spans and exports them; a `forkd.telemetry.tracing.Tracer`.

    Args:
        endpoint: Where a collector listens; spans are posted to `/v1/traces` there.
    """

    def __init__(self, endpoint: str) -> None:
        about = {"service.name": "forkd", "service.version": VERSION}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        url = f"{endpoint.rstrip('/')}/v1/traces"
        exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("forkd", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Send what is left, and end the thread; blocks."""
        self._provider.shutdown()

    @contextlib.contextmanager
    def request(self, name: str, headers: Mapping[str, str]) -> Generator[None, None, None]:
        """Make the span of a request; a `traceparent` that makes no sense is ignored."""
        context = self._propagator.extract(headers, Context())
        span = self._tracer.start_span(name, context, SpanKind.SERVER)
        with _ended(span), self.within(span):
            yield

    @contextlib.contextmanager
    def span(self, name: str, attributes: Attributes) -> Generator[None, None, None]:
        """Make a span below the innermost, if there is one."""
        parent = _current.get()
        if parent is None:
            yield
            return
        context = set_span_in_context(parent, Context())
        span = self._tracer.start_span(name, context, attributes=attributes)
        with _ended(span), self.within(span):
            yield

    def note(self, name: str | None, attributes: Attributes) -> None:
        """Say more of the innermost span."""
        span = _current.get()
        if span is not None:
            span.set_attributes(attributes)
            if name is not None:
                span.update_name(name)

    def here(self) -> object:
        """Return the innermost span."""
        return _current.get()

    @contextlib.contextmanager
    def within(self, span: object) -> Generator[None, None, None]:
        """Have `span` be the innermost within the block."""
        token = _current.set(span if isinstance(span, Span) else None)
        try:
            yield
        finally:
            # A stream may be closed by another task than the one that began it.
            with contextlib.suppress(ValueError):
                _current.reset(token)


@contextlib.contextmanager
def _ended(span: Span) -> Generator[None, None, None]:
    """End a span with the block, and say which error ended it."""
    try:
        yield
    except Exception as error:
        code = error.code if isinstance(error, ForkdError) else type(error).__name__
        span.set_attribute("error.type", code)
        span.set_status(Status(StatusCode.ERROR))
        raise
    finally:
        span.end()
