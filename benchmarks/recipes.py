"""What a snapshot saves: a recipe's cold start, against a fork of it until its first answer.

Each recipe is baked, which is a cold start whose stages are noted; then it is forked, one child at
a time, and each child is asked the recipe's question as soon as it is ready.  All are forked by the
service, each in its cgroup and without a jail, which `walls` measures.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks import bed, programs
from benchmarks.harness import Json, Stopwatch, median
from benchmarks.hogs import forked
from benchmarks.questions import EVAL_TIMEOUT_S
from benchmarks.teller import Teller, say
from forkd.errors import EngineError
from forkd.model.caller import local_caller
from forkd.model.exec import ExecRequest, Stderr, Stdout
from forkd.model.ids import parse_tag
from forkd.model.sandbox import ForkOptions
from forkd.service.host import open_host

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from forkd.model.ids import SandboxId, Tag
    from forkd.service.host import Host
    from forkd.service.settings import HostSettings

FOLDER = bed.RECIPES

CALLER = local_caller()

FORK_DEADLINE_S = 600.0
"""How long one child may take where the processor is emulated."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a child of a recipe is asked first: what the recipe is for.

    Attributes:
        code: Evaluated in its warm runtime; a command of the shell if it has none.
        answer: The one right value, or what the command prints.
        runtime: The warm runtime; `NO_RUNTIME` if it has none.
    """

    code: str
    answer: object
    runtime: str = "python"


NO_RUNTIME = "none"

QUESTIONS: Mapping[str, Question] = {
    "redis": Question("[cache.get('user:7'), cache.zcard('scores')]", ["name 7", 10_000]),
    "python-numpy": Question("numpy.zeros(5).tolist()", [0.0] * 5),
    "python-data": Question(
        "int(LinearRegression().fit([[0], [1]], [1, 3]).predict([[2]])[0] + 0.5)", 5
    ),
    "coding-agent": Question("run_tests('/srv/project')['exit']", 0),
    "chromium": Question("visit('data:text/html,<title>hi</title>')['title']", "hi"),
    "onnx": Question(
        "identify('def main():\\n    import os\\n    return os.getcwd()\\n')", "python"
    ),
    "node": Question("[1, 2, 3].map((n) => n ** 2)", [1, 4, 9], "node"),
    "postgresql": Question("sql('SELECT sum(n)::int FROM generate_series(1, 100) n')", [[5050]]),
    "debian-minimal": Question("apt --version | cut -c1-3", "apt", NO_RUNTIME),
    "jupyter-kernel": Question("cell('np.arange(4).sum()')[0]['data']['text/plain']", "6"),
    "pytest": Question(
        "run('test_prices.py::test_nothing_costs_nothing')",
        {"test_prices.py::test_nothing_costs_nothing": "passed"},
    ),
    "ci-parallel-pytest": Question("check()", 0),
    "java": Question("IntStream.rangeClosed(1, 10).map(n -> twice(n)).sum()", 110, "java"),
    "code-interpreter": Question(
        "[int(pd.Series([1, 2, 4]).sum()), js('[1, 2, 4].length')]", [7, 3]
    ),
}
"""Of each recipe that is measured."""

ROUNDS = 5
ROUNDS_QUICK = 2
"""How often each recipe is forked, after one fork that does not count."""


def everything() -> tuple[str, ...]:
    """Return the recipes, and the programs that need no packages or have theirs."""
    return (*QUESTIONS, *(name for name in programs.PROGRAMS if programs.is_ready(name)))


def parse_names(text: str) -> tuple[str, ...]:
    """Read names of recipes, separated by commas.

    Raises:
        argparse.ArgumentTypeError: One is not measured, or lacks its packages.
    """
    chosen = tuple(text.split(","))
    for name in chosen:
        if name not in QUESTIONS and name not in programs.PROGRAMS:
            known = ", ".join((*QUESTIONS, *programs.PROGRAMS))
            raise argparse.ArgumentTypeError(f"{name!r} is none of {known}")
        if name in programs.PROGRAMS and not programs.is_ready(name):
            raise argparse.ArgumentTypeError(
                f"{name} needs its packages in {programs.PACKAGES / name}: run "
                "tests/functional/test_recipe_frameworks.py with --soak first"
            )
    return chosen


def folders(names: Iterable[str]) -> list[Path]:
    """Return the recipes whose images are needed."""
    return [FOLDER / (name if name in QUESTIONS else programs.BASE) for name in names]


def steps(names: Collection[str]) -> int:
    """Return how many steps are told of these recipes."""
    run = len([name for name in names if name in programs.PROGRAMS])
    return 2 * (len(names) - run) + (1 + run if run else 0)


async def measure(
    settings: HostSettings, teller: Teller, names: Iterable[str], *, quick: bool
) -> Json:
    """Measure one recipe after the other; nothing of it is left stored.

    Raises:
        ForkdError: One could not be baked or forked, or answered wrongly.
    """
    rounds = ROUNDS_QUICK if quick else ROUNDS
    figures: Json = {}
    names = list(names)
    for name in [each for each in names if each in QUESTIONS]:
        question, tag = QUESTIONS[name], parse_tag(f"bench-{name}")
        teller.begin(f"cold start of {name}")
        baked = await bed.bake(settings, FOLDER / name, _tell, tag)
        teller.begin(f"forks of {name}")
        async with open_host(settings) as host:
            asked_ms = [await first_answer(host, tag, question) for _ in range(rounds + 1)]
            await host.snapshots.delete(CALLER, tag)
            # Its base as well: the next one starts cold, too.
            for left in await host.snapshots.list(CALLER):
                await host.snapshots.delete(CALLER, left.tag)
        figures[name] = of_recipe(baked.stages_s, asked_ms[1:])
        _tell(f"{name}: {json.dumps(figures[name])}")
    run = [each for each in names if each in programs.PROGRAMS]
    return figures | (await measure_programs(settings, teller, run) if run else {})


async def measure_programs(settings: HostSettings, teller: Teller, names: Iterable[str]) -> Json:
    """Run programs over one snapshot, which is gone after.

    Raises:
        ForkdError: The snapshot could not be baked, or a program failed.
    """
    figures: Json = {}
    tag = parse_tag("bench-programs")
    teller.begin(f"cold start of {programs.BASE}")
    baked = await bed.bake(settings, FOLDER / programs.BASE, _tell, tag)
    cold_s = baked.stages_s["boot"] + baked.stages_s["warm"]
    async with open_host(settings) as host:
        async with forked(host, tag, ForkOptions(deadline_s=FORK_DEADLINE_S), 1):
            pass  # the first fork starts the zygote
        for name in names:
            teller.begin(name)
            taken_s = await programs.run(settings, host, tag, name)
            figures[name] = programs.of_program(name, cold_s, taken_s)
            _tell(f"{name}: {json.dumps(figures[name])}")
        await host.snapshots.delete(CALLER, tag)
    return figures


def _tell(text: str) -> None:
    say({"event": "progress", "message": text})


async def first_answer(host: Host, tag: Tag, question: Question) -> float:
    """Return how long it takes from the request to fork until a question is answered.

    Raises:
        EngineError: The answer was wrong.
    """
    clock = Stopwatch()
    async with forked(host, tag, ForkOptions(deadline_s=FORK_DEADLINE_S), 1) as (sandbox,):
        answer, said = await ask(host, sandbox.id, question)
        taken_ms = clock.ms()
    if answer != question.answer:
        raise EngineError(f"a sandbox of {tag} answered {said}, not {question.answer!r}")
    return taken_ms


async def ask(host: Host, sandbox: SandboxId, question: Question) -> tuple[object, str]:
    """Return what a sandbox answers, and the same or its error in words."""
    if question.runtime == NO_RUNTIME:
        command = ExecRequest(("sh", "-c", question.code))
        async with await host.guests.exec(CALLER, sandbox, command) as session:
            events = [event async for event in session]
        said = b"".join(each.data for each in events if isinstance(each, (Stdout, Stderr))).decode()
        return said.removesuffix("\n"), said
    result = await host.guests.eval(
        CALLER, sandbox, question.code, timeout_s=EVAL_TIMEOUT_S, runtime=question.runtime
    )
    if result.error is not None:
        return None, result.error.traceback
    return result.value, result.repr or ""


def of_recipe(stages_s: Json, asked_ms: Iterable[float]) -> Json:
    """Return the figures of one recipe.

    Args:
        stages_s: How long each stage of its bake took; without a warm-up, not that.
        asked_ms: How long each fork took until its first answer.
    """
    boot_s, warm_s = stages_s["boot"], stages_s.get("warm", 0.0)
    answered_s = median(asked_ms) / 1e3
    return {
        "boot_s": boot_s,
        "warm_s": warm_s,
        "cold_s": boot_s + warm_s,
        "first_answer_s": answered_s,
        "ratio": (boot_s + warm_s) / answered_s,
    }


def publish(bench: Json, path: Path) -> None:
    """Write the figures of a run to the file that the page of the documentation is made of.

    A recipe that was not measured keeps its own figures; each has its day and its machine.
    """
    kept = json.loads(path.read_text(encoding="utf-8"))["recipes"] if path.exists() else {}
    measured = {"place": bench["machine"]["place"], "started_at": bench["started_at"]}
    kept |= {name: figures | measured for name, figures in bench["recipes"].items()}
    text = json.dumps({"recipes": kept}, indent=2, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")
