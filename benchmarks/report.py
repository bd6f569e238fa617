"""Show the figures: a table of those that have a budget, and a plot of each part that was run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes

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
    Row("… against the floor", "first_eval.ratio_to_floor", "x", 10.0),  # of a tuned host: ADR 0051
    Row("1000 forked, alive and answering", "fork_1000.answered", "children"),
    Row("… per child", "fork_1000.ms_per_child", "ms"),
    Row("… against 100, per child", "fork_1000.ratio_to_100", "x", 1.3),
    Row("private memory after an eval, p50", "memory.private_mib_p50", "MiB", 3.0),
    Row("fall of MemAvailable per child", "memory.mem_available_mib_per_child", "MiB"),
    Row("processors that the host may have", "host_memory.possible_cpus", ""),
    Row("fall of MemAvailable per sandbox", "host_memory.kib_per_child.available", "KiB"),
    Row("… its own pages", "host_memory.kib_per_child.anonymous", "KiB"),
    Row("… for each processor", "host_memory.kib_per_child.per_cpu", "KiB"),
    Row("… kernel objects", "host_memory.kib_per_child.slab", "KiB"),
    Row("vsock echo, p50", "vsock_echo.p50_ms", "ms"),
    Row("eval, p50", "eval.p50_ms", "ms"),
    Row("… against the echo", "eval.ratio_to_echo", "x", 3.0),
    Row("exec of /bin/true, p50", "exec.p50_ms", "ms"),
    Row("boot to the agent", "boot.ms", "ms"),
    Row("bake, image already built", "bake.stages_s.total", "s"),
    Row("zygote start", "zygote.start_ms", "ms"),
    Row("branch: pause, 16 MiB dirty", "branch.pause_ms.16", "ms"),
    Row("… against the probe", "branch.ratio_to_probe.16", "x", 1.5),
    Row("branch: pause, 256 MiB dirty", "branch.pause_ms.256", "ms"),
    Row("… against the probe", "branch.ratio_to_probe.256", "x", 1.5),
    Row("branch: pause, 1024 MiB dirty", "branch.pause_ms.1024", "ms"),
    Row("… against the probe", "branch.ratio_to_probe.1024", "x", 1.5),
    Row("branch: one sibling has answered, p50", "branch.sibling_answered_ms", "ms"),
    Row("… against the floor's child", "branch.sibling_ratio_to_floor", "x", 10.0),
    Row("branch: 100 siblings have answered", "branch.n100_wall_ms", "ms"),
    Row("… against the floor", "branch.n100_ratio_to_floor", "x", 6.0),
    Row("branch: longest stall a guest saw, p99", "branch.guest_stall_ms_p99", "ms"),
    Row("… when nobody branched it", "branch.guest_stall_unbranched_ms_p99", "ms"),
    Row("100 forked by the service, jailed and in cgroups", "walls.wall_ms.walled", "ms"),
    Row("… against without", "jail.ratio", "x", 1.05),
    Row("… with a network each, against without", "network.ratio", "x"),
    Row(
        "… jailed, in cgroups and with a network each, against none of it", "walls.ratio", "x", 1.05
    ),
    Row("… and every one has answered a question", "walls.used_ratio", "x"),
    Row("… with slots that no guest is told of, against no walls", "host.ratio", "x", 1.05),
    Row("a network slot with its walls, per child", "slots.ms_per_child", "ms"),
    Row("… of the fork", "slots.of_fork", "x"),
    Row("1000 with a network each, alive and answering", "network_1000.alive", "children"),
    Row("… per child", "network_1000.ms_per_child", "ms"),
    Row("… the last hundred against the first", "network_1000.last_to_first", "x"),
    Row("eval of ten quiet ones beside five hogs, p99", "hogs.beside.p99_ms", "ms"),
    Row("… against alone", "hogs.p99_ratio", "x", 2.0),
    Row("one fork beside a hostile tenant, p99", "tenants.beside.p99_ms", "ms"),
    Row("… alone", "tenants.alone.p99_ms", "ms"),
    Row("… beside against alone", "tenants.p99_ratio", "x", 2.0),
    Row("… while the hostile one is stopped", "tenants.held.p99_ms", "ms"),
    Row("fork of a base", "chain.depth_0_ms", "ms"),
    Row("fork of the eighth link over it", "chain.depth_8_ms", "ms"),
    Row("… against the base", "chain.ratio", "x", 1.1),
    Row("… against that instant stored whole", "chain.ratio_to_whole", "x"),
    Row("snapshot on disk, 7 MiB dirty", "snapshot.durable_ms.7", "ms"),
    Row("snapshot on disk, 121 MiB dirty", "snapshot.durable_ms.121", "ms"),
    Row("snapshot on disk, 1024 MiB dirty", "snapshot.durable_ms.1024", "ms"),
    Row("reset, p50", "reset.p50_ms", "ms"),
    Row("… against a fork", "reset.ratio_to_fork", "x", 0.7),
    Row("one fork by the daemon, p50", "clients.alone.p50_ms", "ms"),
    Row("… beside 200 slow, silent, vanishing clients", "clients.beside_ratio", "x", 1.1),
    Row("… in time of the daemon's processor", "clients.beside_cpu_ratio", "x"),
    Row("… what these take of it when nobody forks", "clients.visitors_cpu", "x"),
    Row("… after 500 requests at once", "clients.after_ratio", "x", 1.1),
    Row("… in time of the daemon's processor", "clients.after_cpu_ratio", "x"),
    Row("… among them, p50", "clients.among.p50_ms", "ms"),
    Row("500 requests at once, all answered", "clients.requests_answered_ms", "ms"),
    Row("tasks: four workers have begun, forks", "executor.start_ms.forks", "ms"),
    Row("… against processes", "executor.start_ms.ratio", "x"),
    Row("… a small task, forks", "executor.task_ms.forks", "ms"),
    Row("… against processes", "executor.task_ms.ratio", "x"),
    Row("… a task in a fork of its own", "executor.fresh_ms.forks", "ms"),
    Row("… against a process of its own", "executor.fresh_ms.ratio", "x"),
    Row("tests: pytest by itself", "testing.plain_s", "s"),
    Row("… with xdist, against that", "testing.xdist_ratio", "x"),
    Row("… in forks, against that", "testing.forks_ratio", "x"),
    Row("… each in a fork of its own, against that", "testing.fresh_ratio", "x"),
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
    if "recipes" in bench:
        asked = {name: each for name, each in bench["recipes"].items() if "boot_s" in each}
        run = {name: each for name, each in bench["recipes"].items() if "boot_s" not in each}
        for shown_figures, table_of in ((asked, of_recipes), (run, of_programs)):
            if shown_figures:
                Console().print(table_of(shown_figures))
    if "host" in bench:
        Console().print(of_settings(bench["host"]))


def of_recipes(recipes: Json) -> Table:
    """Return the table of recipes: cold starts, and forks until their first answer."""
    table = Table(title="cold start against fork to first answer", title_justify="left")
    table.add_column("recipe")
    for name in ("boot", "warm-up", "fork to first answer", "ratio"):
        table.add_column(name, justify="right")
    for name, figures in recipes.items():
        times = [f"{figures[each]:,.2f} s" for each in ("boot_s", "warm_s", "first_answer_s")]
        table.add_row(name, *times, f"{shown(figures['ratio'])} x")
    return table


def of_programs(programs: Json) -> Table:
    """Return the table of programs: with cold starts in place of forks, and as they are."""
    table = Table(title="programs with cold starts against forks", title_justify="left")
    table.add_column("program")
    for name in ("sandboxes", "with cold starts", "with forks", "ratio"):
        table.add_column(name, justify="right")
    for name, figures in programs.items():
        times = [f"{figures[each]:,.2f} s" for each in ("without_s", "program_s")]
        table.add_row(name, str(figures["sandboxes"]), *times, f"{shown(figures['ratio'])} x")
    return table


def of_settings(host: Json) -> Table:
    """Return the table of settings of the host: medians, and the quarters around them."""
    table = Table(title="forks by how the host is set, ms", title_justify="left")
    table.add_column("setting")
    wide = f"{host['width']} forks"
    for name in ("one fork", wide, "slowest tenth", "build", "agent", "faults", "mappings"):
        table.add_column(name, justify="right")
    for name, each in host["settings"].items():
        spreads = [each[figure] for figure in ("one_ms", "hundred_ms", "slowest_tenth_ms")]
        table.add_row(
            name,
            *(
                f"{found['p50']:,.0f} ({found['p25']:,.0f}-{found['p75']:,.0f})"
                for found in spreads
            ),
            *(shown(each["stages_ms"][stage]) for stage in ("build", "agent")),
            *(f"{each[figure] or 0:,}" for figure in ("guest_faults", "mappings")),
        )
    return table


def shown(value: float) -> str:
    """Return a figure with as many digits as it is worth."""
    return f"{value:,.0f}" if value >= DIGITS_FROM else f"{value:.2f}"


def look_up(bench: Json, path: str) -> Any:  # noqa: ANN401 - JSON
    """Return the figure at `path`; None if this run has none."""
    value: Any = bench
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def plot(bench: Json, folder: Path) -> list[Path]:
    """Draw each part that was run, as SVG and PNG in `folder`; return the files."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes a second to load

    where = f"forkd in the {bench['machine']['place']}, {bench['machine']['cpus']} CPUs"
    written = []
    for part, has, draw in PLOTS:
        if look_up(bench, has) is None:
            continue
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        axes.set(title=where)
        axes.grid(visible=True, which="both", alpha=0.3)
        draw(bench, axes)
        for suffix in ("svg", "png"):
            written.append(folder / f"{part}.{suffix}")
            figure.savefig(written[-1])
    return written


def _draw_forks(bench: Json, axes: Axes) -> None:
    forks = bench["forks"]
    widths = [fork["n"] for fork in forks]
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
    )
    axes.legend()


def _draw_pauses(bench: Json, axes: Axes) -> None:
    branch = bench["branch"]
    for name, label, style in (
        ("pause_ms", "forkd", "o-"),
        ("probe_pause_ms", "probe: stop, save, fork, go", "k^:"),
    ):
        sizes = [int(size) for size in branch[name]]
        axes.plot(sizes, list(branch[name].values()), style, label=f"{label}, median")
        every = branch[f"{name}_all"].items()
        points = [(int(size), ms) for size, taken in every for ms in taken]
        axes.plot(*zip(*points, strict=True), style[:-1] if style[0] != "k" else "k^", alpha=0.25)
    axes.set(
        xscale="log",
        xlabel="memory that the guest writes to without end, MiB",
        ylabel="pause of the source, ms",
        ylim=(0, None),
    )
    axes.legend()


def _draw_siblings(bench: Json, axes: Axes) -> None:
    branch = bench["branch"]
    _bars(
        axes,
        {
            "one sibling\nhas answered": branch["sibling_answered_ms"],
            "10 x floor's child": 10 * branch["floor_one_child_ms"],
            "100 siblings\nhave answered": branch["n100_wall_ms"],
            "6 x floor of 100": 6 * branch["floor_n100_wall_ms"],
            "longest stall\nof a guest, p99": branch["guest_stall_ms_p99"],
        },
    )


def _draw_chain(bench: Json, axes: Axes) -> None:
    chain = bench["chain"]
    samples = [chain["depth_0_ms_all"], chain["depth_8_ms_all"]]
    axes.boxplot(samples, tick_labels=["base", "eighth link"])
    axes.set(ylabel="fork of one child until it has answered, ms", ylim=(0, None))


def _draw_snapshots(bench: Json, axes: Axes) -> None:
    durable = bench["snapshot"]["durable_ms"]
    axes.plot([int(size) for size in durable], list(durable.values()), "o-")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="memory written to since the fork, MiB",
        ylabel="from the request until it is on disk, ms",
    )


def _draw_resets(bench: Json, axes: Axes) -> None:
    reset = bench["reset"]
    axes.boxplot([reset["ms_all"], reset["fork_ms_all"]], tick_labels=["reset", "fork"])
    axes.set(ylabel="time until the agent has answered, ms", ylim=(0, None))


def _draw_walls(bench: Json, axes: Axes) -> None:
    every = bench["walls"]["all_ms"]
    labels = {"bare": "no walls", "walled": "jail, cgroup", "linked": "jail, cgroup,\nnetwork"}
    axes.boxplot([every[name] for name in labels], tick_labels=list(labels.values()))
    axes.set(ylabel=f"fork of {bench['walls']['n']} until all are ready, ms", ylim=(0, None))


def _draw_crowd(bench: Json, axes: Axes) -> None:
    forked_ms, width = bench["network_1000"]["forked_ms"], bench["walls"]["n"]
    alive = [width * (number + 1) for number in range(len(forked_ms))]
    axes.plot(alive, [ms / width for ms in forked_ms], "o-")
    axes.set(
        xlabel="sandboxes with a network each, alive",
        ylabel="fork, ms per child",
        ylim=(0, None),
    )


def _bars(axes: Axes, values: dict[str, float]) -> None:
    axes.barh(list(values), list(values.values()))
    axes.set(xscale="log", xlabel="ms")
    axes.invert_yaxis()


PLOTS: tuple[tuple[str, str, Callable[[Json, Axes], None]], ...] = (
    ("bench", "forks", _draw_forks),
    ("bench-pause", "branch", _draw_pauses),
    ("bench-branch", "branch", _draw_siblings),
    ("bench-chain", "chain", _draw_chain),
    ("bench-snapshot", "snapshot.durable_ms", _draw_snapshots),
    ("bench-reset", "reset", _draw_resets),
    ("bench-walls", "walls", _draw_walls),
    ("bench-network", "network_1000", _draw_crowd),
)
"""The name of each plot's files, the figures without which it is not drawn, and who draws it."""
