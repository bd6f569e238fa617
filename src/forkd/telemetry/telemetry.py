"""Times what a host does and counts how it ended.

    with telemetry.operation("fork"):
        ...

Names are those of `forkd.telemetry.names`, so that dashboards and alerts are checked against what
exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

from forkd.errors import ForkdError
from forkd.telemetry import names, tracing

if TYPE_CHECKING:
    from collections.abc import Generator

    from forkd.telemetry.names import Metric

OK, CANCELLED, CRASHED = "ok", "cancelled", "internal"
"""Results of operations that have no error code."""

# Nobody asks when a series began, and those that say it would be many.
disable_created_metrics()  # type: ignore[no-untyped-call]  # the library's own

M = TypeVar("M", Counter, Gauge, Histogram)


class Telemetry:
    """The figures of one host.

    Attributes:
        registry: Where Prometheus finds them.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._made = {each.name: self._make(each) for each in names.OURS}

    @contextlib.contextmanager
    def operation(self, name: str) -> Generator[None, None, None]:
        """Time what the block does, count how it ended, and trace it.

        Args:
            name: One of `names.OPERATION_NAMES`.
        """
        result, began_s = CRASHED, time.monotonic()
        try:
            with tracing.span(f"service {name}"):
                yield
            result = OK
        except ForkdError as error:
            result = error.code
            raise
        except (asyncio.CancelledError, GeneratorExit):
            result = CANCELLED
            raise
        finally:
            self.observe(names.OPERATION_SECONDS, time.monotonic() - began_s, name)
            self.count(names.OPERATIONS, name, result)

    @contextlib.contextmanager
    def request(self, kind: str) -> Generator[None, None, None]:
        """Count a request as being answered within the block; `names.REQUESTS` has the kinds."""
        requests = self._series(Gauge, names.REQUESTS, (kind,))
        requests.inc()
        try:
            yield
        finally:
            requests.dec()

    def count(self, metric: Metric, *labels: str) -> None:
        """Add one to a counter's series of these labels."""
        self._series(Counter, metric, labels).inc()

    def observe(self, metric: Metric, seconds: float, *labels: str) -> None:
        """Add a duration to a histogram's series of these labels."""
        self._series(Histogram, metric, labels).observe(seconds)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge's series of these labels."""
        self._series(Gauge, metric, labels).set(value)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all figures as text, and which media type it is.

        Args:
            accept: What the scraper takes, as in its `Accept` header.
        """
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type

    def _series(self, kind: type[M], metric: Metric, labels: tuple[str, ...]) -> M:
        made = self._made[metric.name]
        if not isinstance(made, kind):
            raise TypeError(f"{metric.name} is a {metric.kind}")
        return made.labels(*labels) if metric.labels else made

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        made: Counter | Gauge | Histogram
        about = (metric.name, metric.meaning, metric.labels)
        match metric.kind:
            case names.Kind.COUNTER:
                made = Counter(*about, registry=self.registry)
            case names.Kind.GAUGE:
                made = Gauge(*about, registry=self.registry)
            case names.Kind.HISTOGRAM:
                made = Histogram(*about, registry=self.registry, buckets=names.BUCKETS_S)
        for labels in metric.values:
            made.labels(*labels)
        return made
