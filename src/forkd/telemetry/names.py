"""The names of all metrics, what they mean, and which labels they have.

Named by the conventions of Prometheus: base units, `_total` for counters.  Labels have a bounded
number of values: never an id, a tag or a tenant.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: As it is scraped, but for the endings of histograms.
        meaning: In a sentence.
        labels: What tells its series apart.
    """

    name: str
    meaning: str
    labels: tuple[str, ...] = ()


BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0,
)  # fmt: skip
"""Upper bounds of histograms, in seconds."""

OPERATION_SECONDS = Metric(
    "forkd_operation_duration_seconds", "How long operations took.", ("operation",)
)
OPERATIONS = Metric(
    "forkd_operations_total",
    "Operations that have ended, by how: ok, cancelled, or the code of the error.",
    ("operation", "result"),
)
PAUSE_SECONDS = Metric("forkd_branch_pause_seconds", "How long machines was paused to be branched.")
FIRST_ANSWER_SECONDS = Metric(
    "forkd_first_answer_seconds", "From a child's clone until its agent has answered."
)
