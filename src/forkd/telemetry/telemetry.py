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
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram

from forkd.errors import ForkdError
from forkd.telemetry import names, tracing

if TYPE_CHECKING:
    from collections.abc import Generator

OK, CANCELLED, CRASHED = "ok", "cancelled", "internal"
"""Results of operations that have no error code."""


class Telemetry:
    """The figures of one host.

    Attributes:
        registry: Where Prometheus finds them.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seconds = self._histogram(names.OPERATION_SECONDS, ("operation",))
        self._results = Counter(
            names.OPERATIONS.name,
            names.OPERATIONS.meaning,
            ("operation", "result"),
            registry=self.registry,
        )
        self._pause_seconds = self._histogram(names.PAUSE_SECONDS)
        self._first_answer_seconds = self._histogram(names.FIRST_ANSWER_SECONDS)

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
            self._seconds.labels(name).observe(time.monotonic() - began_s)
            self._results.labels(name, result).inc()

    def note_pause(self, pause_ms: float) -> None:
        """Note for how long a machine was paused for its branch."""
        self._pause_seconds.observe(pause_ms / 1_000)

    def note_first_answer(self, total_ms: float) -> None:
        """Note how long after its clone a child answered."""
        self._first_answer_seconds.observe(total_ms / 1_000)

    def _histogram(self, metric: names.Metric, labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(
            metric.name, metric.meaning, labels, registry=self.registry, buckets=names.BUCKETS_S
        )
