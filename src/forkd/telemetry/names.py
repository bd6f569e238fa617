"""The names of all metrics, what they mean, and which labels they have.

Named by the conventions of Prometheus: base units, `_total` for counters.  Labels have a bounded
number of values: never an id, a tag or a tenant.  `forkd.telemetry.telemetry` makes every metric
that is in `ALL`, and documentation, dashboard and alerts are checked against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: As it is scraped, but for the endings of histograms.
        kind: How it behaves.
        meaning: In a sentence.
        labels: What tells its series apart.
        values: Series that there are from the beginning, so that the first change is seen as one;
            by the values of their labels.
    """

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()


BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0,
)  # fmt: skip
"""Upper bounds of histograms, in seconds."""

EXEC = "exec"
"""The operation of a command, from its start to its end; its use case only starts it."""

OPERATION_NAMES = frozenset({
    EXEC, "bake", "branch", "build", "build_link", "change_network", "change_quotas",
    "change_sandbox", "compact", "compare", "connect_port", "console_log", "create_token",
    "delete_sandbox", "delete_snapshot",
    "draw_trees", "echo", "eval", "extend", "find_sandbox", "follow_console_log", "follow_events",
    "fork", "get_network", "get_recipe", "get_sandbox", "get_snapshot", "get_usage", "host_info",
    "list_dir", "list_images", "list_recipes", "list_sandboxes", "list_secrets", "list_snapshots",
    "list_tenants", "list_tokens", "list_usage", "make_dir", "metrics", "move_file", "pack",
    "pause", "ping", "promote", "read_archive", "read_file", "remove_file", "remove_image",
    "remove_quotas", "remove_secret", "remove_token", "reset", "resume", "set_limits", "set_quotas",
    "set_secret", "share_snapshot", "snapshot_image", "start_exec", "stat_file", "tidy",
    "tree_budgets", "unpack", "upload_recipe", "write_archive", "write_file",
})  # fmt: skip
"""Values of the label `operation`: the use cases of all components, and `exec`."""

OPERATION_SECONDS = Metric(
    "forkd_operation_duration_seconds",
    Kind.HISTOGRAM,
    "How long operations took, those that failed included.",
    ("operation",),
)
OPERATIONS = Metric(
    "forkd_operations_total",
    Kind.COUNTER,
    "Operations that have ended, by how: `ok`, `cancelled`, or the code of the error.",
    ("operation", "result"),
)
CHILDREN = Metric(
    "forkd_children_total",
    Kind.COUNTER,
    "Children of forks and branches, by what became of them: `ready` or `failed`.",
    ("result",),
    (("ready",), ("failed",)),
)
CHILDREN_AGAIN = Metric(
    "forkd_children_again_total",
    Kind.COUNTER,
    "Children that were forked more than once, because their guest was reset before it was ready.",
)
PAUSE_SECONDS = Metric(
    "forkd_branch_pause_seconds", Kind.HISTOGRAM, "How long machines were paused to be branched."
)
FIRST_ANSWER_SECONDS = Metric(
    "forkd_first_answer_seconds",
    Kind.HISTOGRAM,
    "From a child's clone until its agent has answered.",
)
LOGINS_DENIED = Metric(
    "forkd_logins_denied_total",
    Kind.COUNTER,
    "Requests over TCP without a token, or with one that is not valid.",
)
REQUESTS = Metric(
    "forkd_requests_in_progress",
    Kind.GAUGE,
    "Requests being answered, by `kind`: `http`, `websocket`, or `events` for a stream of events.",
    ("kind",),
    (("http",), ("websocket",), ("events",)),
)
SANDBOXES = Metric("forkd_sandboxes", Kind.GAUGE, "Sandboxes, by state.", ("state",))
SNAPSHOTS = Metric("forkd_snapshots", Kind.GAUGE, "Snapshots, by status.", ("status",))
ZYGOTES = Metric("forkd_zygotes", Kind.GAUGE, "Zygotes that are kept for the next fork.")
BUILDS = Metric(
    "forkd_builds",
    Kind.GAUGE,
    "Images being built or found built, and those that wait for it, by state: `running` or "
    "`waiting`.",
    ("state",),
)
FOLLOWERS = Metric("forkd_followers", Kind.GAUGE, "Clients that follow events.")
SLOTS_READY = Metric(
    "forkd_network_slots_ready", Kind.GAUGE, "Network slots that were made ahead of need."
)
PRIVATE_BYTES = Metric(
    "forkd_private_memory_bytes",
    Kind.GAUGE,
    "Private memory of all sandboxes and the seeds that they are reset to.",
)
SHARED_BYTES = Metric(
    "forkd_shared_memory_bytes",
    Kind.GAUGE,
    "Memory of zygotes, and what sandboxes share with each other: each page counts once.",
)
HOST_AVAILABLE_BYTES = Metric(
    "forkd_host_memory_available_bytes",
    Kind.GAUGE,
    "Memory of the host that could be given out now, as its kernel estimates.",
)
DISK_FREE_BYTES = Metric(
    "forkd_disk_free_bytes",
    Kind.GAUGE,
    "What is free on the file system of a folder: `state`, or `tops` for private disks.",
    ("folder",),
)
DISK_SIZE_BYTES = Metric(
    "forkd_disk_size_bytes",
    Kind.GAUGE,
    "Size of the file system of a folder, as above.",
    ("folder",),
)
TOPS_BYTES = Metric(
    "forkd_tops_bytes", Kind.GAUGE, "What private disks of sandboxes take on their file system."
)
LAG_SECONDS = Metric(
    "forkd_event_loop_lag_seconds",
    Kind.GAUGE,
    "By how much the event loop was late, at most, within the last minute.",
)
BUILD_INFO = Metric(
    "forkd_build_info", Kind.GAUGE, "Always 1; its label says which forkd this is.", ("version",)
)

PROCESS = (
    Metric("process_cpu_seconds_total", Kind.COUNTER, "CPU time of the daemon."),
    Metric("process_open_fds", Kind.GAUGE, "Descriptors that the daemon has open."),
    Metric("process_max_fds", Kind.GAUGE, "Descriptors that it may have open."),
    Metric("process_resident_memory_bytes", Kind.GAUGE, "Memory of the daemon itself."),
    Metric("process_virtual_memory_bytes", Kind.GAUGE, "Its address space."),
    Metric("process_start_time_seconds", Kind.GAUGE, "When it began, since 1970."),
)
"""The daemon as a process, as Prometheus' clients have it in every program."""

OURS = (
    OPERATION_SECONDS, OPERATIONS, CHILDREN, CHILDREN_AGAIN, FIRST_ANSWER_SECONDS, PAUSE_SECONDS,
    SANDBOXES, SNAPSHOTS, ZYGOTES, SLOTS_READY, PRIVATE_BYTES, SHARED_BYTES, HOST_AVAILABLE_BYTES,
    DISK_FREE_BYTES, DISK_SIZE_BYTES, TOPS_BYTES,
    BUILDS, REQUESTS, FOLLOWERS, LOGINS_DENIED, LAG_SECONDS, BUILD_INFO,
)  # fmt: skip
"""Those that `Telemetry` makes."""

ALL = (*OURS, *PROCESS)
"""Every metric that the daemon exports."""
