"""Show the figures: a table of those that have a budget, and spawn time against N."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.harness import Json


DIGITS_FROM = 100
"""Figures from here on are shown without their fraction."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table.

    Attributes:
        what: The figure, in words.
        path: Where it is in the figures, with dots.
        unit: What it counts.
        most: Its budget; None if it has none.
    """

    what: str
    path: str
    unit: str
    most: float | None = None


ROWS = (
    Row("floor, per child of 100", "floor.ms_per_child", "ms"),
    Row("floor, one child alone", "floor.one_child_ms", "ms"),
    Row("100 forked, each has answered", "fork.wall_ms", "ms"),
    Row("… against the floor", "fork.ratio_to_floor", "x", 4.0),
    Row("… a child, from the request, p50", "fork.p50_ms", "ms"),
    Row("… a child, from the request, p99", "fork.p99_ms", "ms"),
    Row("… a child, from its own clone, p50", "fork.child_p50_ms", "ms"),
    Row("one child, fork to first eval, p50", "first_eval.p50_ms", "ms"),
    Row("… against the floor", "first_eval.ratio_to_floor", "x", 6.0),
    Row("1000 forked, alive and answering", "fork_1000.answered", "children"),
    Row("… per child", "fork_1000.ms_per_child", "ms"),
    Row("… against 100, per child", "fork_1000.ratio_to_100", "x", 1.3),
    Row("private memory after an eval, p50", "memory.private_mib_p50", "MiB", 3.0),
    Row("fall of MemAvailable per child", "memory.mem_available_mib_per_child", "MiB"),
    Row("vsock echo, p50", "vsock_echo.p50_ms", "ms"),
    Row("eval, p50", "eval.p50_ms", "ms"),
    Row("… against the echo", "eval.ratio_to_echo", "x", 3.0),
    Row("exec of /bin/true, p50", "exec.p50_ms", "ms"),
    Row("boot to the agent", "boot.ms", "ms"),
    Row("bake, image already built", "bake.stages_s.total", "s"),
    Row("zygote start", "zygote.start_ms", "ms"),
    Row("rounds repeated, a child had ended", "rounds_repeated", ""),
    Row("guest's faults until it answers", "fork.guest_faults_p50.to_answer", ""),
)


def show(bench: Json) -> None:
    """Print the table."""
    machine = bench["machine"]
    table = Table(
        title=f"{machine['place']}: {machine['cpus']} x {machine['cpu']}, {machine['kernel']}",
        title_justify="left",
    )
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("budget", justify="right")
    for row in ROWS:
        value = look_up(bench, row.path)
        if value is None:
            continue
        over = row.most is not None and value > row.most
        budget = "" if row.most is None else f"≤ {row.most:g} {row.unit}"
        table.add_row(
            row.what, f"{shown(value)} {row.unit}", budget, style="bold red" if over else None
        )
    Console().print(table)


def shown(value: float) -> str:
    """Return a figure with as many digits as it is worth."""
    return f"{value:,.0f}" if value >= DIGITS_FROM else f"{value:.2f}"


def look_up(bench: Json, path: str) -> Any:  # noqa: ANN401 - JSON
    """Return the figure at `path`; None if this run has none."""
    value: Any = bench
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def plot(bench: Json, path: Path) -> None:
    """Draw spawn time against N, beside the floor, as the file's suffix says."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes a second to load

    forks = bench["forks"]
    widths = [fork["n"] for fork in forks]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, times, style in (
        ("first eval answered", [fork["first_eval"]["wall_ms"] for fork in forks], "s--"),
        ("agent answered", [fork["wall_ms"] for fork in forks], "o-"),
        ("floor: bare fork, KVM machine, one exit", [f["floor_wall_ms"] for f in forks], "k^:"),
    ):
        axes.plot(widths, times, style, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="children forked by one request",
        ylabel="time until the last one, ms",
        title=f"forkd in the {bench['machine']['place']}, {bench['machine']['cpus']} CPUs",
    )
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)
