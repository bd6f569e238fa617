import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command_line
from benchmarks import (
    branch,
    chain,
    clients,
    executor,
    hogs,
    memory,
    programs,
    recipes,
    tenants,
    testing,
    walls,
)
from benchmarks.bed import Child, Herd, durations, resized
from benchmarks.floor import Floor
from benchmarks.harness import MIB, available_mib, machine, median, private_mib, quantile, summary
from benchmarks.report import PLOTS, ROWS, look_up, plot, show, shown
from benchmarks.run import PARTS, Width, assemble, parse_parts, steps
from forkd.engine.guest import Guest
from forkd.engine.process import VSOCK_SOCKET
from forkd.engine.replies import SpawnStages
from forkd.errors import EngineError, InvalidRequest
from forkd.host import proc
from forkd.images.recipe import load_recipe
from tools import gen_recipe_times

FLOOR_FIGURES = {"create_vm": 1.0, "run": 2.0}


@pytest.fixture
def widths() -> dict[int, Width]:
    made = {}
    for n in (1, 100, 1000):
        floor = Floor(Path("floor"), n, [n * 2.0], [1.5], [FLOOR_FIGURES])
        width = Width(n, floor)
        guest = Guest(Path(VSOCK_SOCKET))
        times = SpawnStages(clone=1, build=2, resume=3, agent=4, total=10)
        children = [Child(1, Path(), guest, times, ready_ms=6.0 * (i + 1)) for i in range(n)]
        width.note(Herd(Path("herd"), children))
        width.first_eval_ms += [9.0] * n
        width.first_eval_wall_ms.append(7.0 * n)
        width.private_mib += [2.5] * n
        width.taken_mib.append(5.0 * n)
        width.faults_to_answer += [1500] * n
        made[n] = width
    return made


def test_a_quantile_is_the_least_sample_that_covers_its_share() -> None:
    assert [quantile([4, 1, 3, 2], percent) for percent in (1, 25, 26, 50, 99)] == [1, 1, 2, 2, 4]
    assert median([5.0]) == 5.0


def test_a_quantile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 50)


def test_a_summary_keeps_what_a_table_shows() -> None:
    assert summary([3.0, 1.0, 2.0]) == {"count": 3, "p50_ms": 2.0, "p99_ms": 3.0, "min_ms": 1.0}


def test_ratios_compare_walls_with_the_floor_of_the_same_width(widths: dict[int, Width]) -> None:
    figures = assemble(widths)
    assert figures["fork"]["answered"] == 100
    assert figures["fork"]["wall_ms"] == 600.0
    assert figures["fork"]["ratio_to_floor"] == 3.0
    assert figures["first_eval"]["ratio_to_floor"] == 6.0
    assert figures["fork_1000"] == {
        "answered": 1000,
        "ms_per_child": 6.0,
        "ratio_to_100": 1.0,
        "private_mib_p50": 2.5,
    }
    assert figures["memory"]["mem_available_mib_per_child"] == 5.0


@pytest.fixture
def bench(widths: dict[int, Width]) -> dict[str, object]:
    """Figures of a whole run, but for those of its machines."""
    siblings = branch.Siblings(widths[1].floor, widths[100].floor, [12.0], [1.0], [2.0], [900.0])
    return {
        "machine": machine("a test"),
        **assemble(widths),
        "branch": branch.lay_out(
            [branch.Pauses(mib, mib, [3.0, 4.0], [2.0, 4.0]) for mib in branch.DIRTY_MIB],
            siblings,
            branch.Stalls([5.0], [1.0]),
        ),
        "chain": chain.Depths([10.0], [11.0], [11.0]).figures(),
        "snapshot": {"durable_ms": {str(mib): 2.0 * mib for mib in chain.DURABLE_MIB}},
        "reset": chain.reset_figures([6.0], [12.0]),
        "clients": of_clients().figures(),
        "hogs": hogs.lay_out([10.0, 12.0], [15.0, 18.0], {"cpu": None}),
        "host_memory": memory.lay_out([dict.fromkeys(memory.KINDS, 100.0)]),
        "executor": dict.fromkeys(
            ("start_ms", "task_ms", "fresh_ms"), executor.compared([30.0, 20.0], [10.0])
        ),
        "testing": testing.compared({way: [2.0, 4.0] for way in testing.ways("tag")}),
        "tenants": tenants.lay_out([10.0, 20.0], [15.0, 30.0], [12.0], {}),
        **walls.lay_out(
            {"bare": [200.0, 180.0, 220.0], "walled": [210.0], "linked": [252.0]},
            {"bare": [100.0, 400.0, 100.0], "walled": [126.0], "linked": [132.0]},
            [10.5, 21.0],
            walls.Crowd([100.0, 150.0], [10.0] * 5),
        ),
    }


def of_clients() -> clients.Samples:
    samples = clients.Samples(answered_ms=[900.0, 700.0], visitors_cpu=0.07)
    samples.forks_ms[clients.ALONE] += [[10.0, 11.0], [20.0, 21.0]]
    samples.forks_ms[clients.BESIDE] += [[11.0, 12.0], [21.0, 22.0]]
    samples.forks_ms[clients.AMONG] += [[800.0], [900.0]]
    samples.forks_ms[clients.AFTER] += [[9.0, 10.0], [22.0, 30.0]]
    for kind, taken_ms in ((clients.ALONE, 4.0), (clients.BESIDE, 5.0), (clients.AFTER, 4.0)):
        samples.cpu_ms[kind] += [taken_ms, 2 * taken_ms]
    return samples


def test_what_clients_cost_a_fork_is_a_ratio_of_medians_with_its_spread() -> None:
    figures = of_clients().figures()

    assert figures["beside_ratio"] == 12.0 / 11.0
    assert figures["beside_ratio_by_round"] == [21.0 / 20.0, 11.0 / 10.0]
    assert (figures["beside_cpu_ms"], figures["beside_cpu_ratio"]) == (5.0, 1.25)
    assert (figures["among"]["p50_ms"], figures["requests_answered_ms"]) == (800.0, 700.0)
    assert [figures[kind]["count"] for kind in (clients.ALONE, clients.AMONG)] == [4, 2]


def test_what_walls_and_hogs_cost_are_ratios(bench: dict[str, object]) -> None:
    assert look_up(bench, "jail.ratio") == 1.05
    assert look_up(bench, "network.ratio") == 1.2
    assert look_up(bench, "walls.ratio") == 1.26
    assert look_up(bench, "walls.used_ratio") == 384.0 / 320.0
    assert look_up(bench, "network.used_ratio") == 384.0 / 336.0
    assert look_up(bench, "slots.of_fork") == 0.05
    assert look_up(bench, "slots.ms_per_child") == 0.105
    assert look_up(bench, "host.ratio") == 1.1025
    assert look_up(bench, "hogs.p99_ratio") == 1.5
    assert look_up(bench, "tenants.p99_ratio") == 1.5
    assert look_up(bench, "network_1000.alive") == 5
    assert look_up(bench, "network_1000.ms_per_child") == 50.0
    assert look_up(bench, "network_1000.last_to_first") == 1.5


def test_every_row_of_the_table_is_a_figure_of_the_run(bench: dict[str, object]) -> None:
    elsewhere = {"vsock_echo", "eval", "exec", "rounds_repeated", "boot", "bake", "zygote"}
    for row in ROWS:
        assert row.path.split(".")[0] in elsewhere or look_up(bench, row.path) is not None


def test_ratios_of_branches_chains_and_resets_are_of_medians(bench: dict[str, object]) -> None:
    paths = (
        "branch.ratio_to_probe.worst",
        "branch.sibling_ratio_to_floor",
        "branch.n100_ratio_to_floor",
        "chain.ratio",
        "reset.ratio_to_fork",
    )
    assert [look_up(bench, path) for path in paths] == [1.5, 8.0, 4.5, 1.1, 0.5]


def test_a_whole_run_has_a_plot_of_each_part(bench: dict[str, object], tmp_path: Path) -> None:
    written = plot(bench, tmp_path)
    assert len(written) == 2 * len(PLOTS)
    assert all(path.stat().st_size > 0 for path in written)


def test_a_run_without_a_thousand_can_be_shown_and_drawn(
    widths: dict[int, Width], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del widths[1000]
    bench = {"machine": machine("a test"), **assemble(widths)}
    show(bench)
    assert [path.name for path in plot(bench, tmp_path)] == ["bench.svg", "bench.png"]
    assert "100 forked" in capsys.readouterr().out
    assert (tmp_path / "bench.svg").read_text().startswith("<?xml")


def test_parts_are_chosen_by_name_and_others_are_refused() -> None:
    assert parse_parts("branch,reset") == ("branch", "reset")
    with pytest.raises(argparse.ArgumentTypeError, match="'brunch' is none of fork, branch"):
        parse_parts("brunch")


def test_each_part_adds_its_steps_to_a_run() -> None:
    whole = steps(frozenset(PARTS), quick=True)
    for part in PARTS:
        assert 2 < steps(frozenset({part}), quick=True) < whole


def test_a_resized_recipe_differs_in_its_memory_alone(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "python-numpy"

    made = resized(recipe, tmp_path / "made", 2048)

    before, after = ((folder / "recipe.toml").read_text() for folder in (recipe, made))
    assert after == before.replace("memory_mib = 512", "memory_mib = 2048") != before
    assert (made / "warmup.py").is_file()


def test_a_process_weighs_something_and_less_than_the_host_has() -> None:
    assert 1 < private_mib(os.getpid()) < proc.memory_bytes()[0] / MIB
    assert available_mib() > 0


def test_long_figures_lose_their_fraction_and_short_ones_keep_it() -> None:
    assert [shown(value) for value in (12593.5, 166.31, 9.956, 0.0421)] == [
        "12,594",
        "166",
        "9.96",
        "0.04",
    ]


def of_redis() -> dict[str, float]:
    return recipes.of_recipe({"boot": 4.0, "warm": 8.0, "save": 99.0}, [900.0, 500.0, 400.0])


def test_a_recipe_saves_its_boot_and_its_warm_up_over_a_median_of_forks() -> None:
    assert of_redis() == {
        "boot_s": 4.0,
        "warm_s": 8.0,
        "cold_s": 12.0,
        "first_answer_s": 0.5,
        "ratio": 24.0,
    }


def test_the_stages_of_a_recipe_and_of_its_base_count_together() -> None:
    stages = [("boot", 0.0), ("warm", 4000.0), ("fork", 6000.0), ("warm", 6500.0), ("save", 9500.0)]

    assert durations(stages, 10_000.0) == {
        "boot": 4.0,
        "warm": 5.0,
        "fork": 0.5,
        "save": 0.5,
        "total": 10.0,
    }


def test_a_recipe_without_a_warm_up_saves_its_boot_alone() -> None:
    found = recipes.of_recipe({"boot": 4.0, "save": 99.0}, [500.0])

    assert (found["warm_s"], found["cold_s"], found["ratio"]) == (0.0, 4.0, 8.0)


def test_recipes_are_measured_only_if_they_are_asked_for() -> None:
    assert parse_parts("recipes,fork") == ("recipes", "fork")
    assert "recipes" not in PARTS
    assert steps(frozenset({"recipes"}), quick=True) == 1 + 2 * len(recipes.QUESTIONS)


def test_recipes_are_measured_by_name_and_an_unknown_name_is_refused() -> None:
    assert recipes.parse_names("redis,python-numpy") == ("redis", "python-numpy")
    assert steps(frozenset({"recipes"}), quick=True, names=("redis",)) == 1 + 2
    with pytest.raises(argparse.ArgumentTypeError, match=r"'rediss' is none of .*redis, "):
        recipes.parse_names("redis,rediss")


@pytest.mark.parametrize("name", recipes.QUESTIONS)
def test_each_recipe_that_is_measured_comes_with_forkd_and_is_asked_in_its_runtime(
    name: str,
) -> None:
    assert load_recipe(recipes.FOLDER / name).warmup.runtime == recipes.QUESTIONS[name].runtime


def test_the_figures_of_recipes_are_shown_and_become_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = {"machine": machine("a test"), "started_at": "2026-11-27T19:00:00+00:00"}
    show(bench | {"recipes": {"redis": of_redis()}})
    recipes.publish(bench | {"recipes": {"redis": of_redis()}}, tmp_path / "figures.json")

    page = gen_recipe_times.page(json.loads((tmp_path / "figures.json").read_text()))

    shown_row = capsys.readouterr().out.splitlines()[-2]
    assert all(word in shown_row for word in ("redis", "4.00 s", "8.00 s", "0.50 s", "24.00 x"))
    times = "4.0 s | 8.0 s | 12.0 s | 0.50 s | 24 x | 2026-11-27"
    assert f"| [redis](../../recipes/redis/README.md) | {times} |" in page.splitlines()
    assert "Machine: a test." in page


def test_recipes_that_were_not_measured_keep_their_figures_and_their_day(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    bench = {"machine": machine("a test")}
    first = {"redis": of_redis(), "python-data": of_redis()}
    recipes.publish(bench | {"started_at": "2026-11-27T19:00", "recipes": first}, path)
    again = {"redis": of_redis() | {"warm_s": 7.0}}
    recipes.publish(bench | {"started_at": "2026-11-28T04:00", "recipes": again}, path)

    kept = json.loads(path.read_text())["recipes"]

    assert [kept[name]["warm_s"] for name in ("python-data", "redis")] == [8.0, 7.0]
    assert [kept[name]["started_at"][:10] for name in ("python-data", "redis")] == [
        "2026-11-27",
        "2026-11-28",
    ]


def of_mcp() -> dict[str, Any]:
    return programs.of_program("mcp-agent", 50.0, 20.0)


def test_a_program_saves_a_cold_start_for_each_of_its_sandboxes() -> None:
    assert of_mcp() == {
        "sandboxes": 4,
        "program_s": 20.0,
        "cold_s": 50.0,
        "without_s": 220.0,
        "ratio": 11.0,
    }


def test_a_program_that_ends_with_other_words_is_refused() -> None:
    programs.check("mcp-agent", "a call\n{'scores': [1, 3, 5], 'kept': 3723}\n", 0)
    for said, status in (("a call\n{'error': 'x'}\n", 0), ("", 0), (programs.BASE, 1)):
        with pytest.raises(EngineError, match=f"mcp-agent ended with {status}: "):
            programs.check("mcp-agent", said, status)


def test_every_program_is_measured_once_it_has_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "PACKAGES", tmp_path)
    there = {path.parent.name for path in recipes.FOLDER.glob("*/run.py")}
    assert there == set(programs.PROGRAMS)
    with pytest.raises(argparse.ArgumentTypeError, match="crewai-fanout needs its packages in "):
        recipes.parse_names("crewai-fanout")
    assert "crewai-fanout" not in recipes.everything()
    (tmp_path / "crewai-fanout").mkdir()
    (tmp_path / "crewai-fanout" / "requirements.txt").touch()
    assert recipes.parse_names("crewai-fanout") == ("crewai-fanout",)
    assert recipes.folders(("redis", "mcp-agent")) == [
        recipes.FOLDER / "redis",
        recipes.FOLDER / "python-numpy",
    ]
    assert recipes.steps(("redis", "mcp-agent", "crewai-fanout")) == 2 + 1 + 2


def test_a_run_builds_the_images_of_what_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def measure(images: list[Path], *_: object) -> dict[str, Any]:
        built.extend(images)
        raise EngineError("enough")

    monkeypatch.setattr(command_line, "measure", measure)
    argv = ["benchmarks", "--only", "recipes", "--recipes", "redis,mcp-agent"]
    monkeypatch.setattr("sys.argv", argv)

    assert command_line.main() == 1
    assert {path.name for path in built} == {"redis", "python-numpy"}


def test_the_figures_of_programs_are_shown_and_get_a_table_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"redis": of_redis(), "mcp-agent": of_mcp()}
    bench = {"machine": machine("a test"), "started_at": "2026-11-28T05:00", "recipes": figures}
    show(bench)
    recipes.publish(bench, tmp_path / "figures.json")

    page = gen_recipe_times.page(json.loads((tmp_path / "figures.json").read_text()))

    assert "mcp-agent" in capsys.readouterr().out
    row = "| [mcp-agent](../../recipes/mcp-agent/README.md) | 4 | 220.0 s | 20.0 s | 11.0 x |"
    assert f"{row} 2026-11-28 |" in page.splitlines()
    assert page.index("## Programs") > page.index("[redis]")


def test_what_a_child_takes_of_the_host_is_what_the_kernel_counts_more(tmp_path: Path) -> None:
    (tmp_path / "before").write_text(meminfo(available=9_000, per_cpu=100))
    (tmp_path / "after").write_text(meminfo(available=5_000, per_cpu=300))
    before, after = (memory.meminfo(tmp_path / name) for name in ("before", "after"))

    taken = memory.per_child(before, after, 2)

    assert (taken["available"], taken["per_cpu"], taken["slab"]) == (2_000, 100, 0)


def test_the_processors_of_a_host_are_counted_from_zero(tmp_path: Path) -> None:
    possible = tmp_path / "possible"
    for said, count in (("0\n", 1), ("0-127\n", 128)):
        possible.write_text(said)
        assert memory.possible_cpus(possible) == count


def meminfo(*, available: int, per_cpu: int) -> str:
    """Return what a kernel says of memory; all other kinds are 7 KiB."""
    counted = dict.fromkeys(memory.KINDS.values(), 7)
    counted |= {"MemAvailable": available, "Percpu": per_cpu}
    return "".join(f"{name}:  {kib} kB\n" for name, kib in counted.items())


def test_processors_of_this_host_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "why_not_native", lambda: None)
    with pytest.raises(InvalidRequest, match="--possible-cpus is for the helper machine"):
        command_line.measure([], [], 128)
